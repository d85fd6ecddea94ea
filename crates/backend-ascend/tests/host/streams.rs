//! Streams of a user: events between streams, copies in a stream's order, and calls that come behind what a user has enqueued.

use std::ffi::c_void;
use std::ptr;

use ep_ascend::driver::{Device, Memory, Stream, Table};
use ep_ascend::{AscendEndpoint, Cluster};
use ep_core::engine::Routing;
use ep_core::{Endpoint as _, Error, Nanos, Settings, Shape, Topology};

use super::{FEW, fault, library, stream, twin};

fn event(table: &Table) -> *mut c_void {
    let mut event = ptr::null_mut();
    // SAFETY: the event is written to.
    assert_eq!(unsafe { table.create_event.expect("a function")(&raw mut event) }, 0);
    event
}

#[test]
fn wrong_orders_of_streams_are_refused_by_name() {
    let says = |what: &str, wrong: &dyn Fn(&Table, *mut c_void)| {
        let said = fault(|table| wrong(table, stream(table)));
        assert!(said.contains(what), "{said:?}, expected {what:?}");
    };
    // SAFETY: of all blocks here: numbers may be any, as the twin looks them up.
    says("aclrtStreamWaitEvent: the event was not recorded", &|table, stream| unsafe {
        table.wait_event.expect("a function")(stream, event(table));
    });
    says("aclrtDestroyEvent: a stream waits for the event", &|table, stream| {
        let device = Device::open(table, 0).expect("a device");
        let (a, b) = (Memory::new(&device, 64).expect("memory"), Memory::new(&device, 64).expect("memory"));
        let (other, event) = (Stream::new(&device).expect("a stream"), event(table));
        // SAFETY: the copy is as long as both blocks; the rest as above.
        unsafe {
            other.copy(a.address(), b.address(), 64).expect("a copy");
            table.record_event.expect("a function")(event, other.lend() as *mut c_void);
            table.wait_event.expect("a function")(stream, event);
            table.destroy_event.expect("a function")(event);
        }
    });
    says("aclrtFree: a copy that is enqueued uses the memory", &|table, _| {
        let device = Device::open(table, 0).expect("a device");
        let (a, b) = (Memory::new(&device, 64).expect("memory"), Memory::new(&device, 64).expect("memory"));
        let other = Stream::new(&device).expect("a stream");
        // SAFETY: the copy is as long as both blocks; what is wrong is that one is given back.
        unsafe { other.copy(a.address(), b.address(), 64) }.expect("a copy");
        drop(a);
    });
    says("aclrtMemcpyAsync: 128 bytes from", &|table, stream| {
        let device = Device::open(table, 0).expect("a device");
        let memory = Memory::new(&device, 64).expect("memory");
        let (to, from) = (memory.address() as *mut c_void, memory.address() as *const c_void);
        // SAFETY: the twin refuses what goes beyond the memory.
        unsafe { table.memcpy_in_order.expect("a function")(to, 128, from, 128, 3, stream) };
    });
    says("aclrtDestroyStream: work of the stream is under way", &|table, _| {
        let device = Device::open(table, 0).expect("a device");
        let (a, b) = (Memory::new(&device, 64).expect("memory"), Memory::new(&device, 64).expect("memory"));
        let other = Stream::new(&device).expect("a stream");
        // SAFETY: the copy is as long as both blocks.
        (0..50).for_each(|_| unsafe { other.copy(a.address(), b.address(), 64) }.expect("a copy"));
    });
}

const TOKENS: u32 = 3;
const ROW: usize = 128;

/// A rank alone.
fn alone(table: &Table) -> AscendEndpoint {
    let shape = Shape::builder().experts(4).topk(1).hidden(64).max_tokens(4).build().expect("a shape");
    let topology = Topology::new(1, 1).expect("a topology");
    let settings = Settings::builder(&shape, &topology).deadline(Nanos::from_secs(1)).build().expect("settings");
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW);
    builder.build(table, shape).expect("a cluster").into_endpoints().remove(0)
}

/// A user's stream, which is not given back before its work has ended.
pub(super) struct Users(pub(super) Stream);

impl Drop for Users {
    fn drop(&mut self) {
        // What is told to fail does so once.
        if let Ok(end) = self.0.record().or_else(|_| self.0.record()) {
            while end.has_come() == Ok(false) {}
        }
    }
}

/// Dispatches rows and choices, or a membership, that a user's stream is still to bring; what came. `fails`: a function, and its calls that pass.
fn dispatched(
    seed: u64,
    follows: bool,
    by_choices: bool,
    fails: Option<(&str, u64)>,
) -> Result<(Vec<u8>, [usize; 3]), Error> {
    let session = twin(seed, 1, "Ascend910B1");
    let result = (|| {
        let mut ep = alone(&session.table());
        let device = ep.stream().device().clone();
        // Dropped behind the stream.
        let mut memory = Vec::new();
        let users = Users(Stream::new(&device)?);
        let mut lent = |bytes: &[u8]| -> Result<u64, Error> {
            memory.extend([Memory::of(&device, bytes)?, Memory::zeroed(&device, bytes.len())?]);
            let [.., later, now] = &memory[..] else { unreachable!("two are there") };
            // SAFETY: both are as long, and live until the stream's work has ended.
            unsafe { users.0.copy(now.address(), later.address(), bytes.len()) }?;
            Ok(now.address())
        };
        let x = lent(&[7; TOKENS as usize * ROW])?;
        let chosen: Vec<u8> = [1i64, 2, -1].iter().flat_map(|choice| choice.to_ne_bytes()).collect();
        let (chosen, in_rank) = (lent(&chosen)?, lent(&[1, 1, 0])?);
        if let Some((function, after)) = fails {
            session.fail(function, after, 507_899).expect("a function of the table");
        }
        if follows {
            // SAFETY: the stream is the device's, and lives.
            unsafe { ep.follow(users.0.lend()) }?;
        }
        // SAFETY: memory of the device, of so many rows and numbers, that lives until the calls have ended.
        let rows = unsafe { ep.lent_rows(x, TOKENS, ROW) };
        let routing = if by_choices {
            // SAFETY: as above.
            Routing::TopK { topk_idx: unsafe { ep.lent_array(chosen, 3) }, topk_weights: None }
        } else {
            // SAFETY: as above.
            let in_rank = unsafe { ep.lent_array(in_rank, 3) };
            Routing::Membership { in_rank, tokens_per_expert: vec![0, 1, 1, 0] }
        };
        let got = ep_ascend::block_on(ep.dispatch(&rows, &routing));
        let got = got?;
        let copied = ep.rows_room(got.rows, ROW)?;
        // SAFETY: both are as long.
        ep_ascend::block_on(unsafe { ep.copy(copied.address(), got.x.address(), got.rows as usize * ROW) })?;
        ep.bytes(&copied)
    })();
    assert_eq!(session.fault(), None, "seed {seed}");
    Ok((result?, session.left()))
}

/// What a user has enqueued before a call is there when its kernels, or the host, read it: seed by seed, and nothing is left. A call that
/// does not follow his stream finds other bytes.
#[test]
fn a_call_comes_behind_what_a_user_has_enqueued() {
    let right = |got: &Result<(Vec<u8>, [usize; 3]), Error>| *got == Ok((vec![7; 2 * ROW], [0; 3]));
    for by_choices in [true, false] {
        for seed in 0..20 {
            let got = dispatched(seed, true, by_choices, None);
            assert!(right(&got), "seed {seed}: {got:?}");
        }
        let misses = (0..20).filter(|&seed| !right(&dispatched(seed, false, by_choices, None))).count();
        assert!(misses > 0, "no seed of 20 tells a call that does not follow from one that does");
    }
}

/// Events and copies that the device refuses are named, and nothing is left of them.
#[test]
fn what_a_stream_refuses_is_named_and_nothing_is_left() {
    let mut refused = 0;
    for function in ["aclrtCreateEvent", "aclrtRecordEvent", "aclrtStreamWaitEvent", "aclrtMemcpyAsync"] {
        for after in 0..3 {
            match dispatched(5, true, false, Some((function, after))) {
                Ok((rows, left)) => assert_eq!((rows, left), (vec![7; 2 * ROW], [0; 3]), "{function}, call {after}"),
                Err(error) => {
                    assert!(error.to_string().contains(function), "{function}, call {after}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 4, "{refused} refusals");
}
