//! What roles have posted and what happens later: a transfer leaves, a get reaches the rank that has the bytes, a publish
//! arrives.

use ep_core::Rank;

use super::agenda::Class;
use super::links::Flight;

/// A cell to be raised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Notice {
    pub(super) lane: u32,
    pub(super) cell: u32,
    pub(super) bits: u64,
    /// Puts of the lane that come before.
    pub(super) after: u64,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Post {
    /// The bytes of a put or get are handed to the port of the rank that has them.
    Leave { from: Rank, class: Class, flight: Flight },
    /// A publish arrives.
    Arrive(Notice),
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

    /// How many there were at a time.
    pub(super) fn most(&self) -> usize {
        self.posts.len()
    }
}
