//! The kernels, loaded into a GPU.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use ep_core::layout::KernelWindow;
use ep_core::transport::DeviceSource;

use crate::build::{self, Cache, Source, Target};
use crate::driver::{Device, Kernel, Module};
use crate::error::CudaError;
use crate::far;

/// All kernels of one GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) positions: Kernel,
    pub(crate) members: Kernel,
    pub(crate) counts: Kernel,
    pub(crate) dispatch: Kernel,
    pub(crate) unpack: Kernel,
    pub(crate) blank: Kernel,
    pub(crate) slots: Kernel,
    pub(crate) spread: Kernel,
    pub(crate) fold: Kernel,
    pub(crate) offer: Kernel,
    pub(crate) dispatch_ring: Kernel,
    pub(crate) combine_ring: Kernel,
    pub(crate) dispatch_pulled: Kernel,
    pub(crate) combine_pulled: Kernel,
    pub(crate) give_up: Kernel,
    pub(crate) low_dispatch: Kernel,
    pub(crate) low_combine: Kernel,
    /// The same for results that are still being made; on one node.
    pub(crate) low_combine_ready: Option<Kernel>,
    pub(crate) low_mask: Kernel,
    /// Where there are several nodes.
    pub(crate) low_last_words: Option<Kernel>,
    /// In place of `combine`, where there are several nodes.
    pub(crate) offer_none: Option<Kernel>,
    /// Whether they are those of one shape.
    pub(crate) is_specialised: bool,
    /// Whether the combine's were compiled for the bulk copy engine.
    pub(crate) copies_in_bulk: bool,
    /// By width, ascending.
    combine: Vec<(u32, Kernel)>,
}

/// By GPU, whether they are built for tests, the key of the lanes between nodes, and the shape that they are specialised for.
type Loaded = HashMap<(usize, bool, Option<String>, Option<Arc<str>>), Arc<Kernels>>;

static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

impl Kernels {
    /// The kernels of a GPU, compiled where they must be, and loaded when they are asked for the first time in this process; those for tests where `tests`;
    /// with `lanes` to other nodes, where there are such. Specialised for the shape of a `window`, if it is given and there is a compiler.
    pub(crate) fn of(
        device: &Arc<Device>,
        tests: bool,
        lanes: Option<&DeviceSource>,
        window: Option<&KernelWindow>,
    ) -> Result<Arc<Self>, CudaError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        let shape = window.map(build::shape_of);
        let key = (device.ordinal(), tests, lanes.map(far::key), shape.clone());
        if let Some(kernels) = loaded.get(&key) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = match shape.map(|shape| Self::load(device, tests, lanes, Some(&shape))) {
            Some(Ok(kernels)) => kernels,
            failed => {
                if let Some(Err(problem)) = failed {
                    tracing::warn!(%problem, "kernels are those for all shapes, and small batches some 7 % slower");
                }
                Self::load(device, tests, lanes, None)?
            }
        };
        let kernels = Arc::new(kernels);
        loaded.insert(key, Arc::clone(&kernels));
        Ok(kernels)
    }

    fn load(
        device: &Arc<Device>,
        tests: bool,
        lanes: Option<&DeviceSource>,
        shape: Option<&Arc<str>>,
    ) -> Result<Self, CudaError> {
        let (cache, arch) = (Cache::of_user(), device.arch());
        let built = |target: Target| {
            let target = target.for_tests(tests);
            shape.map_or_else(|| target.clone(), |shape| target.clone().specialised(shape))
        };
        let between = lanes.into_iter().flat_map(|lanes| build::targets_between(&arch, lanes));
        let targets = build::targets(&arch).into_iter().chain(between).map(built);
        let codes = build::codes(&cache, targets.collect())?;
        let load = |target: Target, shared_memory| {
            let target = built(target);
            match codes.get(&target) {
                Some(code) => loaded(device, &target, code, shared_memory),
                None => loaded(device, &target, &build::code(&cache, &target)?, shared_memory),
            }
        };
        let plain = |source| load(Target::new(source, &arch), 0);
        let large = |source| load(Target::new(source, &arch), device.shared_memory());
        let wide = |(ranks, target)| Ok::<_, CudaError>((ranks, load(target, device.shared_memory())?));
        // Those that reach other nodes.
        let between = |source: Source| lanes.and_then(|lanes| source.between_nodes(&arch, lanes));
        let moving =
            |source, shared_memory| load(between(source).unwrap_or_else(|| Target::new(source, &arch)), shared_memory);
        Ok(Self {
            positions: plain(Source::Positions)?,
            members: plain(Source::Members)?,
            counts: moving(Source::Counts, device.shared_memory())?,
            dispatch: large(Source::Dispatch)?,
            unpack: moving(Source::Unpack, 0)?,
            blank: plain(Source::Blank)?,
            slots: moving(Source::Slots, device.shared_memory())?,
            spread: plain(Source::Spread)?,
            fold: plain(Source::Fold)?,
            offer: plain(Source::Offer)?,
            dispatch_ring: moving(Source::DispatchRing, device.shared_memory())?,
            combine_ring: moving(Source::CombineRing, device.shared_memory())?,
            dispatch_pulled: large(Source::DispatchPulled)?,
            combine_pulled: large(Source::CombinePulled)?,
            give_up: plain(Source::GiveUp)?,
            low_dispatch: moving(Source::LowDispatch, device.shared_memory())?,
            low_combine: moving(Source::LowCombine, device.shared_memory() / 4)?,
            low_combine_ready: match lanes {
                None => Some(load(build::low_combine_ready(&arch), device.shared_memory() / 4)?),
                Some(_) => None,
            },
            low_mask: moving(Source::LowMask, 0)?,
            low_last_words: between(Source::LowLastWords).map(|target| load(target, 0)).transpose()?,
            offer_none: between(Source::OfferNone).map(|target| load(target, 0)).transpose()?,
            is_specialised: shape.is_some(),
            copies_in_bulk: build::copies_in_bulk(&arch),
            combine: build::combines(&arch).into_iter().map(wide).collect::<Result<_, _>>()?,
        })
    }

    /// The combine kernel that has the rows of `ranks` ranks in flight, or as many as there is one for.
    pub(crate) fn combine(&self, ranks: u32) -> Kernel {
        let fits = self.combine.iter().find(|(width, _)| *width >= ranks);
        fits.unwrap_or(&self.combine[self.combine.len() - 1]).1
    }
}

/// A kernel that no rank launches, loaded into a GPU when it is asked for the first time: modules are never unloaded.
pub(crate) fn alone(device: &Arc<Device>, source: Source) -> Result<Kernel, CudaError> {
    alone_with(device, source, 0)
}

/// The same with blocks that have so much shared memory of the launch at most.
pub(crate) fn alone_with(device: &Arc<Device>, source: Source, shared_memory: u32) -> Result<Kernel, CudaError> {
    static LOADED: Mutex<BTreeMap<(usize, &str), Kernel>> = Mutex::new(BTreeMap::new());
    let mut kernels = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device.ordinal(), source.kernel());
    if let Some(kernel) = kernels.get(&key) {
        return Ok(*kernel);
    }
    let target = Target::new(source, &device.arch());
    let kernel = loaded(device, &target, &build::code(&Cache::of_user(), &target)?, shared_memory)?;
    kernels.insert(key, kernel);
    Ok(kernel)
}

pub(crate) fn loaded(
    device: &Arc<Device>,
    target: &Target,
    code: &[u8],
    shared_memory: u32,
) -> Result<Kernel, CudaError> {
    Module::load(device, code)?.kernel(target.source.kernel(), shared_memory)
}
