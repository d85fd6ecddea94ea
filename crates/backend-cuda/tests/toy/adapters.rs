//! Ranks of several nodes whose kernels post to adapters themselves (`ep-ibgda`), which are made of software (`soft-hca`): the kernels' own text, the
//! transport's own text and host side, and the bytes of real elements and commands in between.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ep_core::port::{LaneId, LaneKind};
use ep_core::transport::{DeviceLanes, DevicePlace, DeviceTransport, WindowMemory};
use ep_core::{Layout, Rank};
use ep_ibgda::{HostDevice, Ibgda, IbgdaLanes, Lent, Library, Settings};
use soft_hca::{Fabric, Link, Mood};

use crate::job::{Job, reports};
use crate::nodes::{far_job, jobs};
use crate::program::{Checks, Nodes, Program};

/// `toy::Window`.
#[repr(C)]
struct Window {
    base: *mut u8,
    bytes: u64,
}

type MakeLanes = unsafe extern "C" fn(*mut c_void, *const Window, *const *mut u64);
type Run = unsafe extern "C" fn(*const c_char, *const c_char, MakeLanes, *mut c_void) -> c_int;

/// Cards, and the lanes of the ranks on them.
struct Cards {
    // Lanes end before their cards.
    lanes: Vec<IbgdaLanes<HostDevice>>,
    windows: Vec<Lent>,
    fabric: Fabric,
    layout: Layout,
}

impl Cards {
    fn open(&mut self, windows: &[Window]) -> Result<(), ep_core::Error> {
        // SAFETY: the cards' functions are those of the interface.
        let library = unsafe { Library::from(soft_hca::symbol) }.expect("it has all functions");
        for (me, window) in (0..).zip(windows) {
            let settings = Settings::new().relaxed_ordering(true).devices([self.fabric.card(me as usize).name()]);
            // SAFETY: the program's window of that rank, which lives until it asks for the end of the lanes.
            self.windows.push(unsafe { HostDevice::lend(window.base as u64, window.bytes) });
            let memory = WindowMemory::Device { address: window.base as u64, keeper: None, dmabuf: None, copies: None };
            let place = DevicePlace { me: Rank(me), layout: &self.layout, window: memory };
            self.lanes.push(Ibgda::new(library.clone(), HostDevice, settings).open(place)?);
        }
        let offers = self.lanes.iter_mut().map(|lanes| lanes.offer().map(Some)).collect::<Result<Vec<_>, _>>()?;
        self.lanes.iter_mut().try_for_each(|lanes| lanes.connect(&offers))
    }

    /// The states of all lanes of a rank, 0 for those that it has not: `[ranks, lanes]`.
    fn states(&self, me: usize) -> Vec<u64> {
        let count = LaneKind::count(self.layout.tracks());
        let lane = |peer, index| LaneId { peer, kind: LaneKind::from_index(index) };
        let of_peer = |peer| (0..count).map(move |index| lane(peer, index));
        let state = |lane| self.lanes[me].state(lane).unwrap_or(0);
        self.layout.topology().all().flat_map(of_peer).map(state).collect()
    }
}

unsafe extern "C" fn make_lanes(cards: *mut c_void, windows: *const Window, far: *const *mut u64) {
    // SAFETY: what `run` passed, which nobody else uses meanwhile.
    let cards = unsafe { &mut *cards.cast::<Cards>() };
    if windows.is_null() {
        cards.lanes.clear();
        cards.windows.clear();
        return;
    }
    let ranks = cards.layout.topology().ranks() as usize;
    // SAFETY: the program has a window for each rank.
    cards.open(unsafe { std::slice::from_raw_parts(windows, ranks) }).expect("lanes on cards that lack nothing");
    for me in 0..ranks {
        let states = cards.states(me);
        // SAFETY: the program's arrays of as many words for each rank.
        unsafe { std::ptr::copy_nonoverlapping(states.as_ptr(), *far.add(me), states.len()) };
    }
}

/// What the program writes, and what the cards complain of.
fn run(program: &Program, job: &Job) -> (Vec<u8>, Vec<soft_hca::Complaint>) {
    let at = |name: &str| program.folder().join(name);
    fs::write(at("job"), job.bytes()).expect("the job can be written");
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes()).expect("a path");
    let (from, to) = (path(&at("job")), path(&at("results")));
    let layout = job.layout();
    let ranks = layout.topology().ranks() as u8;
    let fabric = Fabric::builder(ranks, Link::Ethernet).mood(Mood::hostile()).seed(job.seed).running();
    let mut cards = Cards { lanes: Vec::new(), windows: Vec::new(), fabric, layout };
    // SAFETY: just compiled, and ended before it is unloaded.
    let library = unsafe { libloading::Library::new(at("program")) }.expect("the program loads");
    // SAFETY: the function has this signature.
    let run = *unsafe { library.get::<Run>("toy_run") }.expect("toy_run");
    // SAFETY: paths that live, and cards that nobody else uses until it returns.
    let status = unsafe { run(from.as_ptr(), to.as_ptr(), make_lanes, (&raw mut cards).cast()) };
    assert_eq!(status, 0, "the program runs");
    let complaints = cards.fabric.complaints();
    (fs::read(at("results")).expect("results"), complaints)
}

#[test]
fn rows_cross_adapters_made_of_software_and_every_bit_is_as_the_oracle_says() {
    let Some(program) = Program::new(Checks::Off, Nodes::Adapters, None) else { return };
    for (name, job) in jobs(1) {
        let (results, complaints) = run(&program, &job);
        let compared = job.verify(&results).unwrap_or_else(|wrong| panic!("{name}: {wrong}; {complaints:?}\n{job:?}"));
        let tokens: u32 = job.rounds.iter().flat_map(|round| &round.tokens).sum();
        assert!(compared.rows >= tokens.into(), "{name}: {compared:?}");
        assert_eq!(complaints, [], "{name}");
    }
}

/// A rank that does nothing, of another node: all that wait for it blame it.
#[test]
fn a_rank_beyond_adapters_that_is_not_there_is_blamed() {
    let Some(program) = Program::new(Checks::Off, Nodes::Adapters, None) else { return };
    let mut job = far_job(1, 2, 2, 2, &[5, 6, 7, 8]);
    (job.absent, job.allowed) = (Some(3), 6_000_000_000);
    let (results, complaints) = run(&program, &job);
    let reports = reports(&mut &results[..]).expect("reports");
    assert!(reports[..3].iter().all(|report| report.status != 0 && report.culprit == 3), "{reports:?}");
    assert_eq!(complaints, []);
}

/// The kernels that post, by the compiler that GPUs' hosts have: none uses local memory.
#[test]
#[ignore = "needs NVRTC"]
fn kernels_that_post_compile_for_gpus() {
    let lanes = ep_ibgda::source(&Settings::new());
    let kernels = ep_cuda::build::check_over("sm_90a", &lanes).unwrap_or_else(|error| panic!("{error}"));
    for kernel in ["ep_counts_kernel", "ep_dispatch_ring_kernel", "ep_combine_ring_kernel", "ep_posts_kernel"] {
        assert!(kernels.iter().any(|(name, _)| name.starts_with(kernel)), "{kernel}: {kernels:?}");
    }
}
