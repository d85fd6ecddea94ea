//! Low latency of one rank: its state on the device, and the launches of its kernels.

use std::mem::offset_of;
use std::sync::Arc;

use ep_core::device::{Local, RankView, Report};
use ep_core::layout::{Alarm, LowKind, value_in};
use ep_core::port::{Cell, Counter, LaneKind};
use ep_core::{Error, Layout, Rank, RankSet};
use zerocopy::IntoBytes;

use super::{Call, RankDevice};
use crate::args::{Launch, Line, Low, LowTell, Positions, low_mail_words};
use crate::driver::{AscendError, Device, Memory};

/// Cores that share what concerns a rank, at most: `EP_LOW_HELPERS` of the kernels.
const HELPERS: usize = 4;

/// What low latency keeps on the device.
#[derive(Debug)]
pub(super) struct LowDevice {
    /// As of throughput mode, but low latency's own: a failure of one is none of the other.
    local: Memory,
    report: Memory,
    /// The windows of the ranks that are not masked.
    windows: Memory,
    lines: Memory,
    words: Memory,
    counts: Memory,
    /// What goes to other servers: where of a window each share's rows belong, and what cores hand to those that post.
    posts: Memory,
    mail: Memory,
    /// The address of the staging memory; 0 within a server.
    staging: u64,
    state: Memory,
    done: Memory,
    /// Launches.
    tickets: u64,
}

impl LowDevice {
    /// None where the layout has no room for low latency. `staging`: where this rank's staging memory is.
    pub(super) fn new(
        device: &Arc<Device>,
        layout: &Layout,
        cores: usize,
        staging: u64,
    ) -> Result<Option<Self>, AscendError> {
        if !layout.settings().low_latency() {
            return Ok(None);
        }
        let ranks = layout.topology().ranks() as usize;
        let results = (layout.shape().max_tokens() * layout.low_columns()) as usize;
        let memory = |bytes| Memory::zeroed(device, bytes);
        Ok(Some(Self {
            local: memory(Local::bytes(ranks))?,
            report: memory(size_of::<Report>())?,
            windows: memory(8 * ranks)?,
            lines: memory(size_of::<Line>() * cores)?,
            words: memory(8 * HELPERS * ranks)?,
            counts: memory(4 * HELPERS * ranks * layout.local_experts() as usize)?,
            posts: memory(if staging == 0 { 8 } else { 8 * HELPERS * ranks * results })?,
            mail: memory(8 * low_mail_words(ranks))?,
            staging,
            state: memory(4 * ranks)?,
            done: memory(8)?,
            tickets: 0,
        }))
    }

    /// Begins a generation with these windows.
    pub(super) fn restart(&self, generation: u16, windows: &[u64]) -> Result<(), AscendError> {
        [&self.local, &self.report, &self.mail].into_iter().try_for_each(|memory| memory.fill(0))?;
        self.local.write(offset_of!(Local, generation), &u32::from(generation).to_le_bytes())?;
        self.windows.write(0, windows.as_bytes())
    }

    pub(super) fn notice_gone(&self, rank: Rank) -> Result<(), AscendError> {
        self.local.write(Local::gone(rank), &1u32.to_le_bytes())
    }
}

/// Which kernel a launch of low latency is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Half {
    Send,
    Receive,
    Return,
    Reduce,
}

impl Half {
    /// The sending half of an operation, or its receiving half.
    pub(crate) const fn of(kind: LowKind, receives: bool) -> Self {
        match (kind, receives) {
            (LowKind::Dispatch, false) => Self::Send,
            (LowKind::Dispatch, true) => Self::Receive,
            (_, false) => Self::Return,
            (_, true) => Self::Reduce,
        }
    }
}

impl RankDevice {
    fn low(&self) -> Result<&LowDevice, Error> {
        self.low
            .as_ref()
            .ok_or_else(|| Error::unsupported("low latency", "a communicator whose settings say low_latency(true)"))
    }

    /// What a launch of low latency is given, which may take `allowed` nanoseconds.
    fn low_prepared(&self, low: &LowDevice, call: &Call, allowed: u64) -> Launch {
        let launch = self.prepared(call, false);
        let r = RankView {
            windows: low.windows.address(),
            local: low.local.address(),
            report: low.report.address(),
            allowed,
            ..launch.r
        };
        Launch { r, lines: low.lines.address(), ..launch }
    }

    /// Positions of a batch of low latency, without what cores tell each other. What a launch of a sending half behind it finds.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn low_positions(&mut self, call: &Call, args: Positions) -> Result<(), Error> {
        let launch = self.low_prepared(self.low()?, call, self.view.allowed);
        // SAFETY: as the caller promises.
        Ok(unsafe { self.positions(Positions { launch, ..args }) }?)
    }

    /// A launch of low latency: its ticket. `args` without what is the rank's own.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs but its positions.
    pub(crate) unsafe fn low_launch(&mut self, call: &Call, half: Half, args: Low, allowed: u64) -> Result<u64, Error> {
        let launch = self.low_prepared(self.low()?, call, allowed);
        let kernel = match half {
            Half::Send => self.kernels.low_send,
            Half::Receive => self.kernels.low_receive,
            Half::Return => self.kernels.low_return,
            Half::Reduce => self.kernels.low_reduce,
        };
        let Some(low) = self.low.as_mut() else { return Err(Error::unsupported("low latency", "its memory")) };
        low.tickets += 1;
        let ticket = low.tickets;
        low.state.fill(0)?;
        let args = Low {
            launch,
            ticket,
            state: low.state.address(),
            words: low.words.address(),
            counts: low.counts.address(),
            staging: low.staging,
            posts: low.posts.address(),
            mail: low.mail.address(),
            done: low.done.address(),
            ..args
        };
        // SAFETY: as the caller promises; what the struct names of this value's lives as long as the value.
        unsafe { self.launch(kernel, &args, 2) }?;
        Ok(ticket)
    }

    /// How the launch with this ticket has ended: none where it went well. What it reported is told once. Nothing of this rank runs.
    pub(crate) fn low_failure(&self, ticket: u64, me: Rank) -> Result<Option<Result<Error, ()>>, Error> {
        let low = self.low()?;
        if low.done.values::<u64>(0, 1)?[0] == ticket {
            return Ok(None);
        }
        let report = low.report.values::<Report>(0, 1)?;
        let error = report[0].low_error(me);
        low.report.fill(0)?;
        // A line is written in pieces: a core that begins to wait in the next launch must not be taken for one that fails again.
        low.lines.fill(0)?;
        low.local.write(offset_of!(Local, failed), &0u32.to_le_bytes())?;
        Ok(Some(error.ok_or(())))
    }

    /// As [`RankDevice::bad_token`], of a batch of low latency.
    pub(crate) fn low_bad_token(&self) -> Result<Option<u32>, Error> {
        Ok(Self::bad_token_in(&self.low()?.local)?)
    }

    /// `[ranks]`: what became of each in the last sending half.
    pub(crate) fn low_state(&self) -> Result<Vec<u32>, Error> {
        let low = self.low()?;
        Ok(low.state.values(0, low.state.bytes() / 4)?)
    }

    /// What `rank` has last said of its waits: every word is more than the one before.
    pub(crate) fn low_word(&self, rank: Rank, generation: u16) -> Result<u64, Error> {
        self.said(rank, Counter::Waiting, generation)
    }

    /// Whom `rank` gives up, if it has told its verdict.
    pub(crate) fn low_verdict(&self, rank: Rank, generation: u16) -> Result<Option<Rank>, Error> {
        let alarm = Alarm::decode(self.said(rank, Counter::Alarm, generation)?);
        Ok(alarm.filter(|alarm| alarm.verdict).map(|alarm| alarm.peer))
    }

    /// A cell of `rank`'s watch lane to this one.
    fn said(&self, rank: Rank, counter: Counter, generation: u16) -> Result<u64, Error> {
        if rank.0 == self.view.me {
            return Ok(0);
        }
        let cell = self.layout.cell(Cell::new(rank, LaneKind::Watch, counter), generation);
        Ok(value_in(generation, self.node.word(Rank(self.view.me), cell)?))
    }

    /// From now on launches of low latency leave `rank` out.
    pub(crate) fn low_leave_out(&self, rank: Rank) -> Result<(), Error> {
        Ok(self.low()?.windows.write(8 * rank.index(), &0u64.to_le_bytes())?)
    }

    /// Tells `masked` that low latency goes on without them, and the others whom this rank blames. `drains`: it lasts until all that was posted to
    /// other servers is there.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn low_tell(
        &self,
        call: &Call,
        masked: &RankSet,
        culprit: Option<Rank>,
        drains: bool,
    ) -> Result<(), Error> {
        let masked = masked.iter().map(|rank| 1 << rank.0).sum();
        let culprit = culprit.map_or(0, |rank| rank.0 + 1);
        let args = LowTell { launch: self.prepared(call, true), masked, culprit, drains: drains.into(), reserved: 0 };
        // SAFETY: as the caller promises.
        Ok(unsafe { self.launch(self.kernels.low_tell, &args, 2) }?)
    }
}
