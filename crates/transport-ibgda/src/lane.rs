//! One lane: its queue, and its state as kernels have it.

use std::sync::atomic::{AtomicBool, Ordering};

use ep_core::device::FarStatus;
use ep_core::port::LaneId;
use ep_core::{Fault, LaneCause};
use zerocopy::{FromBytes, IntoBytes};

use crate::card::{Place, Queue, State};
use crate::completion::{self, BYTES, Outcome};
use crate::error::Error;
use crate::state::QueueState;
use ep_core::transport::PostingDevice;

/// Refused by the text of the verbs: what was posted reaches out of the window, or is no cell.
const REFUSED: u64 = FarStatus::Refused as u64;

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) id: LaneId,
    pub(crate) place: Place,
    /// Where its state lies for the device.
    pub(crate) state_at: u64,
    /// Where the queue's completions lie for the device.
    pub(crate) completions_at: u64,
    /// None before the first offer, and once it was cut.
    pub(crate) queue: Option<Queue>,
    /// The packet sequence number that it begins with.
    pub(crate) psn: u32,
    /// Why nothing may be posted, whatever the completions say.
    pub(crate) closed: Option<LaneCause>,
    /// Whether its first failed completion has been logged since it began.
    pub(crate) told: AtomicBool,
}

/// How far a lane has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// Nothing of it is under way.
    Idle,
    UnderWay,
    Broken(Fault),
}

impl Lane {
    fn broken(&self, cause: LaneCause) -> Progress {
        Progress::Broken(Fault::LaneBroken { lane: self.id, cause })
    }

    /// What its state and its completions say. Kernels may run.
    pub(crate) fn progress<D: PostingDevice>(&self, device: &D) -> Progress {
        if let Some(cause) = self.closed {
            return self.broken(cause);
        }
        match self.read(device) {
            Ok(progress) => progress,
            Err(error) => {
                tracing::error!(lane = %self.id, %error, "the state of a lane cannot be read");
                self.broken(LaneCause::Refused(0))
            }
        }
    }

    fn read<D: PostingDevice>(&self, device: &D) -> Result<Progress, ep_core::Error> {
        let mut bytes = [0; size_of::<QueueState>()];
        device.read(self.state_at, &mut bytes)?;
        let state = QueueState::read_from_bytes(&bytes).expect("its size");
        if state.status == REFUSED {
            return Ok(Progress::Broken(Fault::NotOffered {
                verb: "a post that reaches out of the window",
                lane: self.id,
            }));
        }
        if state.completed >= state.rung {
            return Ok(Progress::Idle);
        }
        let last = self.outcome(device, state.rung - 1, state.log_slots)?;
        if last == Outcome::Done {
            return Ok(Progress::Idle);
        }
        // The first that failed says why; those behind it were flushed, which tells nothing.
        for index in state.completed..state.rung {
            match self.outcome(device, index, state.log_slots)? {
                Outcome::Done => {}
                Outcome::UnderWay => break,
                Outcome::Failed(cause) => {
                    if !self.told.swap(true, Ordering::Relaxed) {
                        tracing::warn!(lane = %self.id, element = index, %cause, "a lane broke");
                    }
                    return Ok(self.broken(cause));
                }
            }
        }
        Ok(Progress::UnderWay)
    }

    fn outcome<D: PostingDevice>(&self, device: &D, index: u64, log_slots: u32) -> Result<Outcome, ep_core::Error> {
        let place = index & ((1 << log_slots) - 1);
        let mut entry = [0; BYTES];
        device.read(self.completions_at + place * BYTES as u64, &mut entry)?;
        Ok(completion::outcome(&entry, index, log_slots))
    }

    /// Whether the adapter has given it up, though no completion says so.
    pub(crate) fn has_failed(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| match queue.state() {
            Ok(state) => state == State::Error,
            Err(error) => {
                tracing::warn!(lane = %self.id, %error, "the adapter says nothing of a lane");
                false
            }
        })
    }

    /// Ends its queue: what it held never arrives, and nothing of this rank is read for it any more. Kernels are told.
    pub(crate) fn close<D: PostingDevice>(&mut self, device: &D, cause: LaneCause) {
        if let Some(queue) = self.queue.take() {
            // A queue that has failed, or whose adapter is gone, need not be failed: it is destroyed either way.
            if let Err(error) = queue.fail() {
                tracing::debug!(lane = %self.id, %error, "a lane that is closed");
            }
        }
        self.closed = Some(cause);
        let status = FarStatus::Broken as u64;
        let at = self.state_at + std::mem::offset_of!(QueueState, status) as u64;
        if let Err(error) = device.write(at, &status.to_ne_bytes()) {
            tracing::error!(lane = %self.id, %error, "kernels cannot be told that a lane is closed");
        }
    }

    /// Writes its state: kernels may post.
    pub(crate) fn begin<D: PostingDevice>(&mut self, device: &D, state: &QueueState) -> Result<(), Error> {
        let refused =
            |error: ep_core::Error| Error::Device { what: "writing the state of a lane", why: error.to_string() };
        device.write(self.state_at, state.as_bytes()).map_err(refused)?;
        self.closed = None;
        *self.told.get_mut() = false;
        Ok(())
    }
}
