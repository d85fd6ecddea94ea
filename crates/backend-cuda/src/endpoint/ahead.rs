//! What a dispatch takes before its counts come, so that the kernels that bring rows follow those that count, and no link waits for a host: a block to be
//! granted. The kernels look whether what comes has room there ([`Local::ahead`](ep_core::device::Local)).

use ep_core::engine::Dispatch;

use super::landing::Landing;
use super::{Array, CudaEndpoint};

impl CudaEndpoint {
    /// Dispatches whose kernels were enqueued ahead of their counts: those that had room for what came, and those that had not, which were enqueued again.
    pub const fn gone_ahead(&self) -> (u64, u64) {
        self.expected.ahead()
    }

    /// Takes a block, and returns for how many rows. Not where no count comes to the host, where more than a block is to be cut for what comes, or where
    /// less is `said` to have room.
    pub(super) fn room_ahead(&mut self, tokens: u32, options: &Dispatch, said: u32) -> Option<u32> {
        if options.device_counts || options.by_expert || options.zero_spare || !self.places() || self.far().is_some() {
            return None;
        }
        if self.expected.rests() {
            return None;
        }
        let room = if options.worst_rows > 0 { options.worst_rows } else { self.expected.rows(tokens)? };
        if room > said {
            return None;
        }
        self.take_block(room);
        self.granted_ahead = self.desk.granted().is_some();
        self.granted_ahead.then_some(room)
    }

    /// The counts have come, if any do: whether what was enqueued ahead goes on, and whether the batch goes through outboxes.
    pub(super) fn know_how_it_went(&mut self, goes_ahead: bool, outboxes: bool) {
        if self.granted_ahead {
            self.expected.went(goes_ahead);
        }
        if outboxes {
            self.expected.had_no_room();
        }
        if goes_ahead {
            self.granted_ahead = false;
        } else {
            self.take_back_ahead();
        }
    }

    /// What was enqueued ahead has done nothing, so peers were told nothing of its block.
    pub(super) fn take_back_ahead(&mut self) {
        if std::mem::take(&mut self.granted_ahead) {
            self.give_block();
        }
    }

    /// Of what was taken ahead, what `rows` rows need; and of their sources.
    pub(super) fn cut(
        &mut self,
        landing: Landing,
        (tokens, ranks): (Array<i32>, Array<i32>),
        rows: u32,
    ) -> (Landing, (Array<i32>, Array<i32>)) {
        let block = self.desk.granted().map(|block| self.desk.arena().cut(&block, rows));
        *self.desk.granted() = block;
        let (count, topk) = (rows as usize, self.desk.shape().topk() as usize);
        let landing = Landing {
            block,
            topk_idx: landing.topk_idx.first(count * topk),
            topk_weights: landing.topk_weights.first(count * topk),
            ..landing
        };
        (landing, (tokens.first(count), ranks.first(count)))
    }
}
