//! What a handle keeps on the device, and what the host learns of it when it asks.

use std::sync::{Arc, OnceLock};

use ep_core::engine::Kept;
use ep_core::plan::{Exchange, Membership, Plan};
use ep_core::{Error, RankSet, Shape};

use super::Array;
use super::by_expert::Placed;
use crate::rank::DevicePlan;

/// What a handle keeps on the device.
#[derive(Debug)]
pub(super) struct Replayed {
    pub(super) plan: DevicePlan,
    pub(super) source_token: Array<i32>,
    pub(super) source_rank: Array<i32>,
    pub(super) shape: Shape,
    pub(super) ranks: u32,
    /// Rows that it received, or made room for.
    pub(super) rows: u32,
    /// Whether rows beyond those that come become zeros.
    pub(super) zero_spare: bool,
    /// Where the choices stand, of a dispatch by expert.
    pub(super) placed: Option<Placed>,
    /// What the host knows; none where a graph makes it anew each time it runs.
    pub(super) known: Option<Known>,
}

/// What does not change any more, once it was fetched.
#[derive(Debug, Default)]
pub(super) struct Known {
    plan: OnceLock<Arc<Plan>>,
    exchange: OnceLock<Arc<Exchange>>,
}

impl From<Exchange> for Known {
    fn from(exchange: Exchange) -> Self {
        Self { plan: OnceLock::new(), exchange: Arc::new(exchange).into() }
    }
}

/// What `cell` holds, or is fetched for it.
fn fetched<T>(cell: Option<&OnceLock<Arc<T>>>, fetch: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
    match cell {
        None => Ok(Arc::new(fetch()?)),
        Some(cell) => match cell.get() {
            Some(value) => Ok(Arc::clone(value)),
            None => {
                let value = Arc::new(fetch()?);
                Ok(Arc::clone(cell.get_or_init(|| value)))
            }
        },
    }
}

impl Kept for Replayed {
    fn size(&self) -> (u32, u32) {
        (self.plan.tokens(), self.rows)
    }

    fn slots(&self) -> Option<u32> {
        self.placed.as_ref().map(Placed::room)
    }

    fn plan(&self) -> Result<Arc<Plan>, Error> {
        fetched(self.known.as_ref().map(|known| &known.plan), || {
            let (in_rank, tokens_per_expert) = self.plan.membership()?;
            let membership = Membership { in_rank: &in_rank, tokens_per_expert: &tokens_per_expert };
            // What goes to masked ranks has been left out.
            Plan::of_membership(&self.shape, self.ranks, &RankSet::new(), membership)
        })
    }

    fn exchange(&self) -> Result<Arc<Exchange>, Error> {
        fetched(self.known.as_ref().map(|known| &known.exchange), || {
            let [rows, tokens, experts] = self.plan.exchanged()?;
            Exchange::new(rows, tokens, experts)
        })
    }
}
