//! What a front desk refuses before anything moves, and in which words.

use super::desk::Desk;
use super::endpoint::Dispatch;
use super::handle::Handle;
use crate::buffers::Extent;
use crate::error::Error;
use crate::plan::{Expansion, tokens_of};
use crate::settings::Rings;
use crate::topology::Rank;

/// Rows of padding that a dispatch by expert may ask for: there is then room for as many rows that come.
const MOST_PADDING: u64 = 1 << 30;

impl Desk {
    /// Refuses a handle of another endpoint, of an earlier generation, or of somebody's own making whose rings do not fit.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_handle(&self, handle: &Handle) -> Result<(), Error> {
        handle.mark().check("handle", &self.mark())?;
        if handle.outboxes() && self.settings().outboxes().is_none() {
            return Err(Error::invalid("handle", "of rows in outboxes", "one of a communicator that has some"));
        }
        self.layout().check_rings(&handle.rings())
    }

    /// Bytes of each of `rows` dense rows that are `bytes` bytes: results, or tokens as they travel.
    pub fn row_bytes_of(&self, bytes: usize, rows: u32) -> usize {
        let result = self.shape().result_bytes() as usize;
        let are_results = Some(bytes) == (rows as usize).checked_mul(result);
        if are_results { result } else { self.shape().row_bytes() as usize }
    }

    /// Refuses rows to dispatch that are fewer than `tokens`, or of another size than they travel with.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_x(&self, x: Extent, tokens: u32) -> Result<(), Error> {
        self.check_rows("x", x, self.shape().row_bytes(), tokens)
    }

    /// Refuses what is no bf16 rows, or fewer than `expected`.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_results(&self, what: &str, rows: Extent, expected: u32) -> Result<(), Error> {
        if rows.are_apart && rows.rows > 0 {
            return Err(Error::invalid(what, "coded rows of a dispatch", "bf16 rows"));
        }
        self.check_rows(what, rows, self.shape().result_bytes(), expected)
    }

    fn check_rows(&self, what: &str, given: Extent, row_bytes: u64, expected: u32) -> Result<(), Error> {
        if given.row_bytes as u64 != row_bytes && given.rows > 0 {
            let limit = format_args!("{row_bytes} bytes for hidden {}", self.shape().hidden());
            return Err(Error::invalid(format_args!("row size of {what}"), given.row_bytes, limit));
        }
        if given.rows < expected {
            let limit = format_args!("at least {expected}");
            return Err(Error::invalid(format_args!("rows of {what}"), given.rows, limit));
        }
        Ok(())
    }

    /// Checks the options of a dispatch. Its rings.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_options(&self, options: &Dispatch) -> Result<Rings, Error> {
        let rings = options.rings.unwrap_or(self.settings().rings());
        self.layout().check_rings(&rings)?;
        options.outbox.check()?;
        if options.expert_alignment == 0 {
            return Err(Error::invalid("expert alignment", 0, "at least 1"));
        }
        let (ranks, tokens) = (self.topology().ranks(), self.shape().max_tokens());
        let most = u64::from(ranks) * u64::from(tokens);
        if u64::from(options.worst_rows) > most {
            let limit = format_args!("at most {most}, of {ranks} ranks with {tokens} tokens");
            return Err(Error::invalid("worst-case rows", options.worst_rows, limit));
        }
        if options.device_counts && options.worst_rows == 0 {
            return Err(Error::invalid("worst-case rows of a dispatch with device counts", 0, "at least 1"));
        }
        if options.zero_spare && options.worst_rows == 0 && !options.by_expert {
            return Err(Error::invalid(
                "worst-case rows of a dispatch whose spare rows are to be zeros",
                0,
                "at least 1",
            ));
        }
        Ok(rings)
    }

    /// Checks that a dispatch may be by expert, if it shall; `has_choices`: its routing is one of choices. Slots to make room for, where it
    /// shall and their number is to stay in the machine's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_by_expert(&self, options: &Dispatch, has_choices: bool) -> Result<Option<u32>, Error> {
        if !options.by_expert {
            return Ok(None);
        }
        if !has_choices {
            return Err(Error::invalid("routing of a dispatch by expert", "a membership", "choices, topk_idx"));
        }
        if options.worst_rows > 0 && !options.device_counts {
            let limit = "0, or with device counts: where the host knows them, rows by expert are as many as come";
            return Err(Error::invalid("worst-case rows of a dispatch by expert", options.worst_rows, limit));
        }
        let (alignment, local) = (options.expert_alignment, self.layout().local_experts());
        if u64::from(alignment) * u64::from(local) > MOST_PADDING {
            let limit = format_args!("at most {}, for {local} local experts", MOST_PADDING / u64::from(local));
            return Err(Error::invalid("expert alignment of a dispatch by expert", alignment, limit));
        }
        if !options.device_counts {
            return Ok(None);
        }
        // A token names an expert once, unless it may do so more often.
        let topk = self.shape().topk();
        let choices = if options.repeats { topk } else { topk.min(local) };
        Expansion::most_slots(options.worst_rows, choices, local, alignment).map(Some)
    }

    /// Checks the lengths of `choices` and of their weights. Tokens of the batch.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_choices(&self, choices: usize, weights: Option<usize>) -> Result<u32, Error> {
        self.check_weights(weights, choices)?;
        tokens_of(choices, self.shape().topk() as usize, "topk_idx", "topk")
    }

    /// Checks a membership whose `in_rank` has `len` entries. Tokens of the batch.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_membership(&self, len: usize, tokens_per_expert: &[u32]) -> Result<u32, Error> {
        let tokens = tokens_of(len, self.topology().ranks() as usize, "in_rank", "ranks")?;
        let experts = self.shape().experts();
        if tokens_per_expert.len() != experts as usize {
            let limit = format_args!("{experts} experts");
            return Err(Error::invalid("length of tokens_per_expert", tokens_per_expert.len(), limit));
        }
        match tokens_per_expert.iter().position(|&count| count > tokens) {
            None => Ok(tokens),
            Some(expert) => {
                let what = format_args!("tokens of expert {expert}");
                let limit = format_args!("at most the {tokens} tokens");
                Err(Error::invalid(what, tokens_per_expert[expert], limit))
            }
        }
    }

    /// Checks a combine of `y` along `handle`, with its rings if it has some of its own, and the length of its weights. Its rings.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_combine(
        &self,
        handle: &Handle,
        rings: Option<Rings>,
        y: Extent,
        bias: impl IntoIterator<Item = Extent>,
        weights: Option<usize>,
    ) -> Result<Rings, Error> {
        let rings = rings.unwrap_or(handle.rings());
        self.layout().check_rings(&rings)?;
        self.check_results("y", y, handle.result_rows())?;
        bias.into_iter().try_for_each(|bias| self.check_results("bias", bias, handle.tokens()))?;
        let topk = self.shape().topk();
        let expected = handle.rows() as usize * topk as usize;
        match weights.filter(|&len| len < expected) {
            Some(len) => {
                let limit = format_args!("{} rows x topk {topk} = {expected}", handle.rows());
                Err(Error::invalid("length of topk_weights", len, limit))
            }
            None => Ok(rings),
        }
    }

    /// Checks a batch of low latency: `x`, and the lengths of choices and of their weights. Its tokens.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_low_batch(
        &self,
        x: Extent,
        choices: usize,
        weights: Option<usize>,
        coded: bool,
    ) -> Result<u32, Error> {
        let (tokens, most) = (self.check_choices(choices, weights)?, self.shape().max_tokens());
        if tokens > most {
            let limit = format_args!("at most {most}, max_tokens of the shape");
            return Err(Error::invalid("tokens of a low-latency dispatch", tokens, limit));
        }
        if coded { self.check_x(x, tokens) } else { self.check_results("x", x, tokens) }?;
        Ok(tokens)
    }

    /// Refuses weights that are not one for each choice.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_weights(&self, weights: Option<usize>, choices: usize) -> Result<(), Error> {
        match weights.filter(|&len| len != choices) {
            Some(len) => {
                Err(Error::invalid("length of topk_weights", len, format_args!("{choices}, that of topk_idx")))
            }
            None => Ok(()),
        }
    }

    /// Refuses to mask this rank, or one that does not exist.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::Unsupported`] without room for low latency.
    pub fn check_mask(&self, rank: Rank) -> Result<(), Error> {
        let ranks = self.topology().ranks();
        if rank == self.rank() || rank.0 >= ranks {
            return Err(Error::invalid("rank to mask", rank, format_args!("another rank, 0 to {}", ranks - 1)));
        }
        self.layout().check_low_latency()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::engine::handle::{Kept, Replay};
    use crate::plan::{Exchange, Plan};
    use crate::{Layout, Settings, Shape, Topology};

    #[derive(Debug)]
    struct Nothing;

    impl Kept for Nothing {
        fn size(&self) -> (u32, u32) {
            (0, 0)
        }

        fn plan(&self) -> Result<Arc<Plan>, Error> {
            Ok(Arc::default())
        }

        fn exchange(&self) -> Result<Arc<Exchange>, Error> {
            Ok(Arc::default())
        }
    }

    #[test]
    fn handles_of_ones_own_making_are_held_to_the_layout() {
        let topology = Topology::new(1, 2).unwrap();
        let shape = Shape::builder().experts(2).topk(1).hidden(16).max_tokens(8).build().unwrap();
        let settings = Settings::builder(&shape, &topology).build().unwrap();
        let desk = Desk::new(Layout::new(&shape, &topology, &settings).unwrap(), Rank(0));
        let handle = |rings: Rings, tokens| {
            let kept = Arc::new(Nothing);
            Handle::of_backend(Replay { mark: desk.mark(), op: 1, rings, outboxes: false, tokens, rows: 0, kept })
        };
        let own = settings.rings();
        assert!(desk.check_handle(&handle(own, 0)).is_ok());
        assert!(handle(own, 0).kept::<Nothing>().is_ok());
        assert!(handle(own, 1).kept::<Nothing>().is_err(), "of other numbers than what was kept");
        let wide = Rings { channels: own.channels + 1, ..own };
        assert!(desk.check_handle(&handle(wide, 0)).is_err(), "more rings than the window has");
        assert!(handle(own, 0).routed().is_err(), "the engine has no routing of it");
    }
}
