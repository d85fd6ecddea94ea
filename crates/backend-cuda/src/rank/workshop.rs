//! Launches of kernels that only tests and measurements have.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use ep_core::Rank;

use super::{Call, RankDevice};
use crate::args;
use crate::build::{Cache, Source, Target, code};
use crate::driver::{Kernel, Launch, Mode, Stream};
use crate::error::CudaError;
use crate::far::key;
use crate::kernels::loaded;

/// By GPU, whether they are built for tests, name, and the key of the lanes between nodes.
type Others = BTreeMap<(usize, bool, &'static str, Option<String>), Kernel>;

static OTHERS: Mutex<Others> = Mutex::new(BTreeMap::new());

impl RankDevice {
    /// A kernel that no call of a user needs: compiled and loaded when it is first asked for.
    fn other(&self, source: Source) -> Result<Kernel, CudaError> {
        let (device, tests) = (self.stream.device(), self.test.is_some());
        let mut others = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
        let far = self.far.as_ref().and_then(|far| source.between_nodes(&device.arch(), far.source()));
        let which = (
            device.ordinal(),
            tests,
            source.name(),
            self.far.as_ref().filter(|_| far.is_some()).map(|far| key(far.source())),
        );
        if let Some(kernel) = others.get(&which) {
            return Ok(*kernel);
        }
        let target = far.unwrap_or_else(|| Target::new(source, &device.arch())).for_tests(tests);
        let kernel = loaded(device, &target, &code(&Cache::of_user(), &target)?, 0)?;
        others.insert(which, kernel);
        Ok(kernel)
    }

    /// Compiles and loads such kernels now: a launch that others wait for should not wait for a compiler.
    pub(crate) fn prepare(&self, sources: &[Source]) -> Result<(), CudaError> {
        sources.iter().try_for_each(|&source| self.other(source).map(drop))
    }

    /// Where the own window lies.
    pub(crate) fn window(&self) -> u64 {
        self.node.address(Rank(self.view.me))
    }

    /// Comes together with all ranks on the device, and pauses for so many nanoseconds.
    pub(crate) fn meet(&self, number: u64, pause: u64) -> Result<(), CudaError> {
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, mode: Mode::Cooperative };
        // SAFETY: nothing is named.
        unsafe { self.launch(self.other(Source::Meet)?, shape, Call::none(), &args::Meet { number, pause }) }
    }

    /// Executes scripts of verbs.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn probe(&self, scripts: u32, args: &args::Probe) -> Result<(), CudaError> {
        let shape = Launch { blocks: scripts, threads: 256, shared_memory: 0, mode: Mode::Cooperative };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.other(Source::Probe)?, shape, Call::none(), args) }
    }

    /// Consumes rows as they come, on another stream of this GPU.
    ///
    /// # Safety
    /// As [`RankDevice`] says, for what is enqueued to `stream`.
    pub(crate) unsafe fn consume(&self, stream: &Stream, blocks: u32, args: &args::Consumer) -> Result<(), CudaError> {
        let shape = Launch { blocks, threads: 256, shared_memory: 0, mode: Mode::Plain };
        let kernel = self.other(Source::Consumer)?;
        // SAFETY: as the caller promises; a kernel without windows has no other parameter.
        unsafe { kernel.launch_alone(stream.device(), stream.raw() as usize, shape, args) }
    }

    /// Stores as much to every peer as `args` say, for measurements.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn ceiling(&self, args: &args::Ceiling) -> Result<(), CudaError> {
        let shape = Launch { blocks: self.blocks, threads: 1024, shared_memory: 0, mode: Mode::Plain };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.other(Source::Ceiling)?, shape, Call::none(), args) }
    }
}
