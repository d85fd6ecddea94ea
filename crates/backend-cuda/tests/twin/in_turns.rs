//! Low latency on a GPU that runs one block of a launch at a time, or a few of many, in any order: as one that others keep busy may. Blocks that begin late
//! find their shares taken, and nobody has waited for them.

use ep_conformance::harness;
use ep_conformance::script::{Script, Seen};
use ep_conformance::{Backend, Requirement, Setup, Travels};
use ep_core::{Error, Layout};
use ep_cuda::CudaEndpoint;
use libtest_mimic::Trial;

use crate::OnTwin;
use crate::common::Cuda;
use crate::few_blocks::{self, CASES};

/// Blocks of a launch.
const BLOCKS: u32 = 5;

/// As many as a GPU of the twin has: each runs a block at a time.
const MULTIPROCESSORS: u32 = 32;

/// Ranks on such GPUs.
struct InTurns {
    ranks: OnTwin,
    at_a_time: u32,
}

impl Backend for InTurns {
    type Endpoint = CudaEndpoint;

    fn absent(&self) -> Option<&'static str> {
        self.ranks.absent()
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        self.ranks.lacks(what)
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        self.ranks.window(layout)
    }

    fn seeds(&self, most: u64) -> u64 {
        self.ranks.seeds(most)
    }

    fn largest(&self) -> (u32, u32) {
        self.ranks.largest()
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        self.ranks.run(setup, async |endpoint| {
            // A rank is a thread.
            ep_cuda_twin::run_at_a_time(self.at_a_time).expect("the twin");
            user(endpoint).await
        })
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        self.ranks.probe(setup, scripts)
    }
}

/// Cases of the suite, and a fault that must be found. `absent`: why nothing runs here.
pub(crate) fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let on = |at_a_time| InTurns { ranks: OnTwin(few_blocks::ranks(absent, BLOCKS)), at_a_time };
    let mut trials = harness::some("one_at_a_time", &CASES, on(1));
    trials.extend(harness::some("three_at_a_time", &CASES, on(3)));
    let name = "one_at_a_time::shares_of_blocks_that_have_not_begun_are_taken";
    trials.push(harness::limited(name.into(), absent, move || {
        few_blocks::shares_are_taken((3, 2 * BLOCKS + 1), |checks, deadline| {
            let cuda = Cuda { checks, deadline: Some(deadline), ..few_blocks::ranks(absent, BLOCKS) };
            InTurns { ranks: OnTwin(cuda), at_a_time: 1 }
        })
    }));
    let as_a_gpu = |cuda| InTurns { ranks: OnTwin(cuda), at_a_time: MULTIPROCESSORS };
    trials.push(few_blocks::waves(absent, 2, as_a_gpu));
    trials
}
