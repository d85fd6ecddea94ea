//! The host side on the twin: a call that is wrong, or in the wrong order, is refused by name; and an endpoint whose calls fail says which did,
//! ends by its deadline, and gives back what it took.

mod dropped;
mod streams;

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use ep_ascend::driver::{AscendError, Device, LaunchAttribute, LaunchConfig, Memory, Table};
use ep_ascend::twin::{Host, Library, Machine, Session};
use ep_ascend::{AscendEndpoint, Cluster, Roles};
use ep_conformance::drive::{Round, round};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::{Batch, Workload};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, LowLatency as _, Nanos, Placement, RankSet, Settings, Shape, Topology};

fn library() -> &'static Library {
    static BUILT: OnceLock<Library> = OnceLock::new();
    let build = || Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &[]);
    BUILT.get_or_init(|| build().unwrap_or_else(|error| panic!("{error}")))
}

fn twin(seed: u64, ranks: u32, soc: &str) -> Session {
    Host::install(Machine::new(library(), seed, ranks, ranks).expect("a machine"), soc).expect("the thread's only twin")
}

const FEW: Roles = Roles { senders: 1, coordinators: 1, forwarders: 0, forwarder_coordinators: 0, receivers: 1 };

/// What a wrong use of the table says.
fn fault(wrong: impl FnOnce(&Table)) -> String {
    let session = twin(1, 2, "Ascend910B1");
    wrong(&session.table());
    session.fault().unwrap_or_default()
}

/// A stream of device 0.
fn stream(table: &Table) -> *mut c_void {
    Device::open(table, 0).expect("a device");
    let mut stream = ptr::null_mut();
    // SAFETY: `stream` is written to.
    assert_eq!(unsafe { table.create_stream.expect("a function")(&raw mut stream) }, 0);
    stream
}

/// A launch of `ep_dispatch` on device 0, with the address of `args`; what the twin answers.
fn launch(table: &Table, stream: *mut c_void, args: u64, is_final: bool, is_batch: bool) -> i32 {
    let path = CString::new(library().path().as_os_str().as_encoded_bytes()).expect("a path");
    let (mut binary, mut function, mut list, mut parameter) =
        (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let attributes = [LaunchAttribute { id: 1, value: [u32::from(is_batch), 0, 0, 0] }];
    let config = LaunchConfig { attributes: attributes.as_ptr(), count: 1 };
    let mut args = args;
    // SAFETY: texts end with zero, results are written to, and what is read lies here until the calls have returned.
    unsafe {
        assert_eq!(table.load_binary.expect("a function")(path.as_ptr(), ptr::null(), &raw mut binary), 0);
        assert_eq!(table.get_function.expect("a function")(binary, c"ep_dispatch".as_ptr(), &raw mut function), 0);
        assert_eq!(table.init_args.expect("a function")(function, &raw mut list), 0);
        table.append_arg.expect("a function")(list, (&raw mut args).cast(), 8, &raw mut parameter);
        if is_final {
            table.finalize_args.expect("a function")(list);
        }
        table.launch.expect("a function")(function, 3, stream, &raw const config, list, ptr::null_mut())
    }
}

#[test]
fn a_call_in_the_wrong_order_is_refused_by_name() {
    let says = |said: String, what: &str| assert!(said.contains(what), "{said:?}, expected {what:?}");
    // Of all blocks here: results are written to, and numbers may be any, as the twin looks them up.
    says(
        // SAFETY: results are written to, and the twin looks up what is named.
        fault(|table| _ = unsafe { table.set_device.expect("a function")(0) }),
        "aclrtSetDevice: aclInit was not called",
    );
    says(fault(|table| drop(Device::open(table, 0).and_then(|device| Memory::new(&device, 0)))), "");
    let mut at = ptr::null_mut();
    says(
        fault(|table| {
            Device::count(table).expect("devices");
            // SAFETY: results are written to, and the twin looks up what is named.
            unsafe { table.malloc.expect("a function")(&raw mut at, 64, 0) };
        }),
        "aclrtMalloc: the thread has no device",
    );
    let of_device = |wrong: &dyn Fn(&Table)| {
        fault(|table| {
            Device::open(table, 0).expect("a device");
            wrong(table);
        })
    };
    // SAFETY: results are written to, and the twin looks up what is named.
    says(of_device(&|table| _ = unsafe { table.set_device.expect("a function")(2) }), "device 2 of 2");
    // SAFETY: results are written to, and the twin looks up what is named.
    says(of_device(&|table| _ = unsafe { table.free.expect("a function")(64 as *mut c_void) }), "no memory begins");
    // SAFETY: results are written to, and the twin looks up what is named.
    says(of_device(&|table| _ = unsafe { table.enable_peer_access.expect("a function")(0, 0) }), "peer 0 of device 0");
    says(
        of_device(&|table| {
            let mut event = ptr::null_mut();
            let mut status = 0;
            // SAFETY: results are written to, and the twin looks up what is named.
            unsafe {
                table.create_event.expect("a function")(&raw mut event);
                table.query_event.expect("a function")(event, &raw mut status);
            }
        }),
        "the event was not recorded",
    );
    says(
        of_device(&|table| {
            let device = Device::open(table, 1).expect("a device");
            let memory = Memory::new(&device, 64).expect("memory");
            Device::open(table, 0).expect("a device");
            // SAFETY: 64 bytes of the device's.
            unsafe { table.memset.expect("a function")(memory.address() as *mut c_void, 64, 0, 64) };
        }),
        "memory of device 1, the thread's is 0",
    );
    says(
        of_device(&|table| {
            let device = Device::open(table, 0).expect("a device");
            let memory = Memory::new(&device, 64).expect("memory");
            // SAFETY: the twin refuses what goes beyond the memory.
            unsafe { table.memset.expect("a function")((memory.address() + 32) as *mut c_void, 64, 0, 64) };
        }),
        "64 bytes from",
    );
}

#[test]
fn a_launch_that_could_hang_or_reads_nothing_is_refused() {
    let says = |said: String, what: &str| assert!(said.contains(what), "{said:?}, expected {what:?}");
    let of = |is_final, is_batch, with_args: bool| {
        fault(|table| {
            let stream = stream(table);
            let device = Device::open(table, 0).expect("a device");
            let memory = Memory::zeroed(&device, 4096).expect("memory");
            let args = if with_args { memory.address() } else { 8 };
            assert_ne!(launch(table, stream, args, is_final, is_batch), 0);
        })
    };
    says(of(false, true, true), "not final");
    says(of(true, false, true), "batch mode");
    says(of(true, true, false), "not of one block of device memory");
    let other_device = fault(|table| {
        let stream = stream(table);
        Device::open(table, 1).expect("a device");
        assert_ne!(launch(table, stream, 8, true, true), 0);
    });
    says(other_device, "a stream of device 0, the thread's is 1");
}

/// A kernel that reaches for memory that was given back is found out.
#[test]
fn memory_under_a_launch_must_not_be_given_back() {
    let session = twin(1, 1, "Ascend910B1");
    let table = session.table();
    let stream = stream(&table);
    let device = Device::open(&table, 0).expect("a device");
    let memory = Memory::zeroed(&device, 4096).expect("memory");
    assert_eq!(launch(&table, stream, memory.address(), true, true), 0);
    drop(memory);
    let (mut event, mut status) = (ptr::null_mut(), 0);
    // SAFETY: results are written to.
    unsafe {
        assert_eq!(table.create_event.expect("a function")(&raw mut event), 0);
        assert_eq!(table.record_event.expect("a function")(event, stream), 0);
        while table.query_event.expect("a function")(event, &raw mut status) == 0 && status == 0 {}
    }
    let said = session.fault().unwrap_or_default();
    assert!(said.contains("bounds: "), "{said}");
}

#[test]
fn one_twin_a_thread() {
    let session = twin(1, 1, "Ascend910B1");
    let other = Machine::new(library(), 1, 1, 1).expect("a machine");
    assert!(Host::install(other, "Ascend910B1").is_err());
    drop(session);
    drop(twin(1, 1, "Ascend910B1"));
}

const RANKS: u32 = 2;

fn shape() -> Shape {
    Shape::builder().experts(4).topk(2).hidden(24).max_tokens(8).build().expect("a shape")
}

fn cluster(session: &Session, kernels: PathBuf, deadline: Nanos) -> Result<Cluster, Error> {
    let topology = Topology::new(1, RANKS)?;
    let settings = Settings::builder(&shape(), &topology).slots(3).low_latency(false).deadline(deadline);
    Cluster::builder(topology, kernels).settings(settings.build()?).roles(FEW).build(&session.table(), shape())
}

async fn one_round(mut ep: AscendEndpoint, world: &World, batches: &[Batch]) -> Result<Observed, Error> {
    let how = Round { return_weights: true, ..Round::default() };
    let batch = &batches[ep.rank().index()];
    Ok(round(&mut ep, world, batch, &how).await?.0)
}

/// Each function of the table fails once, at every call of it that a set-up and a round make, or at some of them where they are many.
#[test]
fn whatever_call_fails_is_named_and_nothing_is_left() {
    let world = World::new(shape(), Topology::new(1, RANKS).expect("a topology"), RankSet::new()).expect("a world");
    let batches = Workload::new(shape(), vec![5, 5]).seed(3).batches().expect("batches");
    let names: Vec<_> = twin(1, 1, "Ascend910B1").table().functions().into_iter().map(|(name, _)| name).collect();
    let mut tried = 0;
    for function in names {
        // What cannot fail, or whose failure nobody can do anything about.
        if ["aclrtGetSocName", "aclGetRecentErrMsg", "aclrtFree", "aclrtDestroyStream", "aclrtDestroyEvent"]
            .contains(&function)
        {
            continue;
        }
        let mut after = 0;
        loop {
            let session = twin(2, RANKS, "Ascend910B2");
            session.fail(function, after, 507_899).expect("a function of the table");
            let built = cluster(&session, library().path(), Nanos::from_millis(2));
            let results = match built {
                Ok(cluster) => cluster.run(async |ep| one_round(ep, &world, &batches).await),
                Err(error) => vec![Err(error)],
            };
            assert_eq!(session.fault(), None, "{function}, call {after}");
            let errors: Vec<String> =
                results.iter().filter_map(|result| result.as_ref().err()).map(ToString::to_string).collect();
            if errors.is_empty() {
                // A device that does not answer while something is given back is asked again.
                let is_behind = session.calls(function) > after;
                assert!(
                    !is_behind || function == "aclrtSetDevice",
                    "{function}, call {after}: its failure was not told"
                );
                assert_eq!(session.left(), [0, 0, 0], "{function}, call {after}: something is left");
                let observed: Vec<_> = results.into_iter().flatten().collect();
                verify::run(&world, &batches, &observed).unwrap_or_else(|wrong| panic!("{function}: {wrong}"));
                if is_behind {
                    after += 1;
                    continue;
                }
                break;
            }
            let named =
                errors.iter().any(|said| said.contains(function) && said.contains("ACL_ERROR_RT_DRV_INTERNAL_ERROR"));
            assert!(named, "{function}, call {after}: {errors:?}");
            assert_eq!(session.left(), [0, 0, 0], "{function}, call {after}: something is left");
            (tried, after) = (tried + 1, if after < 4 { after + 1 } else { after * 3 / 2 });
        }
    }
    assert!(tried > 60, "{tried} failures");
}

/// A call of a rank is dropped while its kernels run: what they use stays until they have ended, and the rank recovers.
#[test]
fn a_call_that_is_dropped_lets_its_kernels_end() {
    let world = World::new(shape(), Topology::new(1, RANKS).expect("a topology"), RankSet::new()).expect("a world");
    let batches = Workload::new(shape(), vec![5, 5]).seed(3).batches().expect("batches");
    for polls in 1..=3 {
        let session = twin(polls, RANKS, "Ascend910B1");
        let results =
            cluster(&session, library().path(), Nanos::from_millis(2)).expect("a cluster").run(async |mut ep| {
                let batch = &batches[ep.rank().index()];
                let (x, routing) = ep_conformance::drive::upload(&mut ep, batch)?;
                if ep.rank().0 == 0 {
                    let mut call = Box::pin(ep.dispatch(&x, &routing));
                    let mut left = polls;
                    let ended = std::future::poll_fn(|context| {
                        left -= 1;
                        match call.as_mut().poll(context) {
                            std::task::Poll::Ready(result) => std::task::Poll::Ready(Some(result.map(drop))),
                            std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(None),
                            std::task::Poll::Pending => std::task::Poll::Pending,
                        }
                    });
                    assert!(ended.await.is_none(), "the call is under way");
                    drop(call);
                    drop((x, routing));
                    let poisoned = round(&mut ep, &world, batch, &Round::default()).await.err();
                    assert!(matches!(poisoned, Some(Error::Poisoned { .. })), "{poisoned:?}");
                } else {
                    let first = ep.dispatch(&x, &routing).await;
                    assert!(
                        first.is_err() || ep.dispatch(&x, &routing).await.is_err(),
                        "rank 0 takes no part any more"
                    );
                }
                ep.recover(&RankSet::new()).await?;
                one_round(ep, &world, &batches).await
            });
        assert_eq!((session.fault(), session.left()), (None, [0, 0, 0]), "{polls} polls");
        let observed: Vec<_> =
            results.into_iter().collect::<Result<_, Error>>().unwrap_or_else(|error| panic!("{error}"));
        verify::run(&world, &batches, &observed).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let says = |result: Result<Cluster, Error>, what: &str| {
        let said = result.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(said.contains(what), "{said:?}, expected {what:?}");
    };
    let second = Nanos::from_secs(1);
    let session = twin(1, RANKS, "Ascend910B1");
    says(cluster(&session, PathBuf::from("/no/such/file"), second), "ACL_ERROR_RT_FILE_OPEN");
    let build = |nodes, ranks| {
        let topology = Topology::new(nodes, ranks).expect("a topology");
        let shape = Shape::builder().experts(8).topk(1).hidden(16).max_tokens(4).build().expect("a shape");
        Cluster::builder(topology, library().path()).build(&session.table(), shape)
    };
    says(build(8, 1), "nodes is 8, allowed: 1 to 4");
    says(build(1, 4), "NPU 2 was asked for, 2 are visible");
    let twice = Cluster::builder(Topology::new(1, 2).expect("a topology"), library().path()).devices(vec![1, 1]);
    says(twice.build(&session.table(), shape()), "one that no other rank has");
    let roles = Cluster::builder(Topology::new(1, 2).expect("a topology"), library().path());
    says(roles.roles(Roles { senders: 47, ..FEW }).build(&session.table(), shape()), "cores of all roles is 49");
    drop(session);
    let session = twin(1, RANKS, "Ascend310P3");
    says(cluster(&session, library().path(), second), "`Ascend310P3`, the kernels are for Ascend 910B");
    drop(session);
    let session = twin(1, RANKS, "Ascend910B1");
    let mut table = session.table();
    table.launch = None;
    let lacking = Cluster::builder(Topology::new(1, RANKS).expect("a topology"), library().path()).roles(FEW);
    let ran = lacking.build(&table, shape()).expect("a cluster").run(async |mut ep| {
        let x = ep.rows(&[0; 48], 1)?;
        let topk_idx = ep.array(&[0i64, 1])?;
        ep.dispatch(&x, &ep_core::engine::Routing::TopK { topk_idx, topk_weights: None }).await.map(drop)
    });
    let said = ran[0].as_ref().err().map(ToString::to_string).unwrap_or_default();
    assert!(said.contains("aclrtLaunchKernelWithConfig is missing"), "{said}");
    assert!(
        !Path::new("/no/such/file").exists() && AscendError::FunctionMissing { name: "x" }.to_string().contains("CANN")
    );
}

/// Calls that the settings leave out say so, and rows go through rings whatever the placement.
#[test]
fn what_kernels_lack_is_refused_or_said() {
    let topology = Topology::new(1, RANKS).expect("a topology");
    let settings = Settings::builder(&shape(), &topology).placement(Placement::Direct).build().expect("settings");
    let session = twin(4, RANKS, "Ascend910B1");
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW);
    let batches = Workload::new(shape(), vec![5, 5]).seed(3).batches().expect("batches");
    let world = World::new(shape(), topology, RankSet::new()).expect("a world");
    let ran = builder.build(&session.table(), shape()).expect("a cluster").run(async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let how = Round { return_weights: true, ..Round::default() };
        let (observed, handle) = round(&mut ep, &world, batch, &how).await?;
        assert!(ep.output(&handle).is_none());
        let low = ep.check_at_once().err().map(|error| error.to_string()).unwrap_or_default();
        let ways = ep.ways();
        assert!(ways.placed == 0 && ways.pulled == 0 && ways.ringed == u64::from(handle.rows()), "{ways:?}");
        Ok::<_, Error>((observed, low))
    });
    let (observed, said): (Vec<_>, Vec<_>) =
        ran.into_iter().collect::<Result<Vec<_>, _>>().unwrap_or_else(|error| panic!("{error}")).into_iter().unzip();
    assert!(said.iter().all(|said| said.contains("whose settings say low_latency(true)")), "{said:?}");
    verify::run(&world, &batches, &observed).unwrap_or_else(|wrong| panic!("{wrong}"));
}
