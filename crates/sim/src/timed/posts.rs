//! What roles have posted and what happens later: a transfer leaves, a get reaches the rank that has the bytes, a publish
//! arrives.

use ep_core::Rank;

use super::agenda::Class;

/// A cell to be raised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Notice {
    pub(super) from: Rank,
    /// The lane of the puts that come before, or [`Notice::NO_LANE`] where it never had any.
    pub(super) lane: u32,
    pub(super) cell: u32,
    /// How many puts of the lane come before.
    pub(super) after: u32,
    pub(super) bits: u64,
}

impl Notice {
    pub(super) const NO_LANE: u32 = u32::MAX;
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Post {
    /// The bytes of a put or get are handed to the port of the rank that has them. A [`super::links::Flight`] from then on.
    Leave { from: Rank, to: Rank, class: Class, get: bool, lane: u32, ticket: u64, bytes: u64 },
    /// A publish arrives.
    Arrive(Notice),
    /// The puts that a publish follows have entered.
    Raise(Notice),
    /// All that reached another rank from this one has entered, if nothing more was posted.
    Settled(Rank),
}

/// All of some kind, by numbers that are used again.
#[derive(Debug)]
pub(super) struct Slab<T> {
    items: Vec<T>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}

impl<T: Copy> Slab<T> {
    pub(super) fn add(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(number) => {
                self.items[number as usize] = item;
                number
            }
            None => {
                self.items.push(item);
                (self.items.len() - 1) as u32
            }
        }
    }

    pub(super) fn take(&mut self, number: u32) -> T {
        self.free.push(number);
        self.items[number as usize]
    }

    pub(super) fn get_mut(&mut self, number: u32) -> &mut T {
        &mut self.items[number as usize]
    }

    /// How many there were at a time.
    pub(super) fn most(&self) -> usize {
        self.items.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_posts_are_a_cache_line() {
        assert_eq!(size_of::<Post>(), 32);
    }
}
