//! The kernels, loaded into a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::build::{self, Cache, PULL_WIDTHS, Source, Target};
use crate::driver::{Device, Kernel, Module};
use crate::error::CudaError;

/// All kernels of one GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) layout: Kernel,
    pub(crate) members: Kernel,
    pub(crate) counts: Kernel,
    pub(crate) dispatch: Kernel,
    pub(crate) unpack: Kernel,
    pub(crate) offer: Kernel,
    pub(crate) dispatch_ring: Kernel,
    pub(crate) combine_ring: Kernel,
    pub(crate) low_dispatch: Kernel,
    pub(crate) low_combine: Kernel,
    pub(crate) low_mask: Kernel,
    pub(crate) meet: Kernel,
    pub(crate) ceiling: Kernel,
    /// Compiled when it is first asked for.
    probe: Mutex<Option<Kernel>>,
    tests: bool,
    /// By width, ascending.
    combine: [(u32, Kernel); PULL_WIDTHS.len()],
}

/// By GPU, and whether they are built for tests.
type Loaded = HashMap<(usize, bool), Arc<Kernels>>;

static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

impl Kernels {
    /// The kernels of a GPU, compiled and loaded when they are asked for the first time in this process; those for tests where `tests`.
    pub(crate) fn of(device: &Arc<Device>, tests: bool) -> Result<Arc<Self>, CudaError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        let key = (device.ordinal(), tests);
        if let Some(kernels) = loaded.get(&key) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(Self::load(device, tests)?);
        loaded.insert(key, Arc::clone(&kernels));
        Ok(kernels)
    }

    fn load(device: &Arc<Device>, tests: bool) -> Result<Self, CudaError> {
        let (cache, arch) = (Cache::of_user(), device.arch());
        let load =
            |target: &Target, shared_memory| load(device, &cache, &target.clone().for_tests(tests), shared_memory);
        let plain = |source| load(&Target::new(source, &arch), 0);
        let wide = |width: u32| {
            let target = Target::new(Source::Combine, &arch).define("EP_PULL_WIDTH", width);
            Ok::<_, CudaError>((width, load(&target, device.shared_memory())?))
        };
        let [one, two, four, eight] = PULL_WIDTHS;
        Ok(Self {
            layout: plain(Source::Layout)?,
            members: plain(Source::Members)?,
            counts: plain(Source::Counts)?,
            dispatch: load(&Target::new(Source::Dispatch, &arch), device.shared_memory())?,
            unpack: plain(Source::Unpack)?,
            offer: plain(Source::Offer)?,
            dispatch_ring: plain(Source::DispatchRing)?,
            combine_ring: load(&Target::new(Source::CombineRing, &arch), device.shared_memory())?,
            low_dispatch: load(&Target::new(Source::LowDispatch, &arch), device.shared_memory())?,
            low_combine: load(&Target::new(Source::LowCombine, &arch), device.shared_memory() / 4)?,
            low_mask: plain(Source::LowMask)?,
            meet: plain(Source::Meet)?,
            ceiling: plain(Source::Ceiling)?,
            probe: Mutex::default(),
            tests,
            combine: [wide(one)?, wide(two)?, wide(four)?, wide(eight)?],
        })
    }

    /// The kernel that executes scripts of verbs.
    pub(crate) fn probe(&self, device: &Arc<Device>) -> Result<Kernel, CudaError> {
        let mut probe = self.probe.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = *probe {
            return Ok(kernel);
        }
        let kernel =
            load(device, &Cache::of_user(), &Target::new(Source::Probe, &device.arch()).for_tests(self.tests), 0)?;
        *probe = Some(kernel);
        Ok(kernel)
    }

    /// The combine kernel that has the rows of `ranks` ranks in flight, or as many as there is one for.
    pub(crate) fn combine(&self, ranks: u32) -> Kernel {
        let fits = self.combine.iter().find(|(width, _)| *width >= ranks);
        fits.unwrap_or(&self.combine[self.combine.len() - 1]).1
    }
}

fn load(device: &Arc<Device>, cache: &Cache, target: &Target, shared_memory: u32) -> Result<Kernel, CudaError> {
    Module::load(device, &build::code(cache, target)?)?.kernel(target.source.kernel(), shared_memory)
}
