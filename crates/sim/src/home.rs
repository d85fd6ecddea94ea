//! The world that a run takes place in: of the one scheduler or the other.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll};

use ep_core::machine::{Agreement, Opening, Proposal};
use ep_core::port::{Offset, Scope};
use ep_core::{Error, Fault, Nanos, Rank};

use crate::explore::{self, World};
use crate::port::{Of, Port};
use crate::timed;
use crate::violation::Violation;

/// What ranks and the executor share.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    Explore(Rc<RefCell<World>>),
    Timed(Rc<RefCell<timed::World>>),
}

impl Home {
    /// What was found before a rank's own code panicked.
    pub(crate) fn verdict(&self) -> Option<Violation> {
        match self {
            Self::Explore(world) => world.try_borrow().ok()?.verdict().cloned(),
            Self::Timed(world) => world.try_borrow().ok()?.verdict().cloned(),
        }
    }

    /// The time on a rank's clock.
    pub(crate) fn now(&self, rank: Rank) -> Nanos {
        match self {
            Self::Explore(world) => world.borrow().now(),
            Self::Timed(world) => world.borrow().now_of(rank),
        }
    }

    /// A rank computes for a while. Explore knows no such time.
    pub(crate) fn spend(&self, rank: Rank, time: Nanos) {
        if let Self::Timed(world) = self {
            world.borrow_mut().spend(rank, time);
        }
    }

    pub(crate) fn open(&self, rank: Rank, opening: Opening) -> Port {
        Port(match self {
            Self::Explore(world) => {
                let number = world.borrow_mut().open(rank, opening);
                Of::Explore(explore::Port::new(Rc::clone(world), rank, number))
            }
            Self::Timed(world) => {
                let number = world.borrow_mut().open(rank, opening);
                Of::Timed(timed::Port::new(Rc::clone(world), rank, number))
            }
        })
    }

    /// Copies out of a rank's window, for its main line.
    pub(crate) fn read(&self, rank: Rank, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        match self {
            Self::Explore(world) => world.borrow_mut().read((rank, None), from, into),
            Self::Timed(world) => world.borrow_mut().read(rank, from, into),
        }
    }

    /// Copies into a rank's window, for its main line.
    pub(crate) fn write(&self, rank: Rank, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        match self {
            Self::Explore(world) => world.borrow_mut().write((rank, None), to, bytes),
            Self::Timed(world) => world.borrow_mut().write(rank, to, bytes),
        }
    }

    /// The rank stops lanes.
    pub(crate) fn poll_reset(&self, rank: Rank, scope: Scope, context: &Context<'_>) -> Poll<()> {
        match self {
            Self::Explore(world) => {
                world.borrow_mut().reset(rank, scope);
                Poll::Ready(())
            }
            Self::Timed(world) => world.borrow_mut().poll_reset(rank, context),
        }
    }

    /// A rank comes to agree with the others.
    pub(crate) fn arrive(&self, rank: Rank, proposal: Proposal, deadline: Nanos) {
        match self {
            Self::Explore(world) => world.borrow_mut().arrive(rank, proposal, deadline),
            Self::Timed(world) => world.borrow_mut().arrive(rank, proposal, deadline),
        }
    }

    /// The answer to a rank that came.
    pub(crate) fn poll_answer(&self, rank: Rank, context: &Context<'_>) -> Poll<Result<Agreement, Error>> {
        match self {
            Self::Explore(world) => world.borrow_mut().meeting().poll_answer(rank, context),
            Self::Timed(world) => world.borrow_mut().poll_answer(rank, context),
        }
    }

    /// A rank stops waiting for an answer.
    pub(crate) fn leave(&self, rank: Rank) {
        match self {
            Self::Explore(world) => {
                if let Ok(mut world) = world.try_borrow_mut() {
                    world.meeting().leave(rank);
                }
            }
            Self::Timed(world) => {
                if let Ok(mut world) = world.try_borrow_mut() {
                    world.leave_meeting(rank);
                }
            }
        }
    }
}
