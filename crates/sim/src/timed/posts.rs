//! What roles have posted and what happens later: a transfer leaves, a get reaches the rank that has the bytes, a publish
//! arrives.

use ep_core::Rank;

use super::agenda::Class;
use super::links::Flight;

/// A cell to be raised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Notice {
    pub(super) from: Rank,
    pub(super) lane: u32,
    pub(super) cell: u32,
    /// Puts of the lane that come before, if it ever had any.
    pub(super) after: Option<u32>,
    pub(super) bits: u64,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Post {
    /// The bytes of a put or get are handed to the port of the rank that has them.
    Leave { from: Rank, to: Rank, class: Class, flight: Flight },
    /// A publish arrives.
    Arrive(Notice),
    /// A publish has arrived before a put that it follows, as did another one after it, if any.
    Held { notice: Notice, next: Option<u32> },
    /// The puts that a publish follows have entered.
    Raise(Notice),
    /// All that reached another rank from this one has entered, if nothing more was posted.
    Settled(Rank),
}

/// All of them, by numbers that are used again.
#[derive(Debug, Default)]
pub(super) struct Posts {
    posts: Vec<Post>,
    free: Vec<u32>,
}

impl Posts {
    pub(super) fn add(&mut self, post: Post) -> u32 {
        match self.free.pop() {
            Some(number) => {
                self.posts[number as usize] = post;
                number
            }
            None => {
                self.posts.push(post);
                (self.posts.len() - 1) as u32
            }
        }
    }

    pub(super) fn take(&mut self, number: u32) -> Post {
        self.free.push(number);
        self.posts[number as usize]
    }

    pub(super) fn post_mut(&mut self, number: u32) -> &mut Post {
        &mut self.posts[number as usize]
    }

    /// How many there were at a time.
    pub(super) fn most(&self) -> usize {
        self.posts.len()
    }
}
