//! Calls that are dropped while their kernels are under way, and kernels that do not come to their end.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use ep_ascend::driver::{Memory, Stream, Table};
use ep_ascend::{AscendEndpoint, Cluster, Roles, Rows, block_on};
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Routing};
use ep_core::{Element, Endpoint as _, Error, Fault, LowLatency as _, Nanos, Settings, Shape, Topology};

use super::streams::Users;
use super::{FEW, library, twin};

const SOC: &str = "Ascend910B1";
const TOKENS: u32 = 40;
const HIDDEN: u32 = 64;

/// The one rank of a communicator.
fn endpoint(table: &Table, element: Element, deadline: Nanos, roles: Roles) -> AscendEndpoint {
    let shape = Shape::builder().experts(4).topk(1).hidden(HIDDEN).max_tokens(2000).element(element).build();
    let (shape, topology) = (shape.expect("a shape"), Topology::new(1, 1).expect("a topology"));
    let settings = Settings::builder(&shape, &topology).low_latency(false).deadline(deadline).build();
    let builder = Cluster::builder(topology, library().path()).settings(settings.expect("settings")).roles(roles);
    builder.build(table, shape).expect("a cluster").into_endpoints().remove(0)
}

/// Rows of bf16, each value another one within its row.
fn rows(ep: &mut AscendEndpoint) -> Rows {
    let values = (0..TOKENS * HIDDEN).map(|i| 0x3f80 + (i % HIDDEN) as u16);
    ep.rows(&values.flat_map(u16::to_le_bytes).collect::<Vec<u8>>(), TOKENS).expect("rows")
}

fn all_to_expert_1(
    ep: &mut AscendEndpoint,
    tokens: u32,
) -> Routing<ep_ascend::Array<i64>, ep_ascend::Array<f32>, ep_ascend::Array<u8>> {
    let topk_idx = ep.array(&vec![1; tokens as usize]).expect("choices");
    Routing::TopK { topk_idx, topk_weights: None }
}

fn start_and_drop(call: impl Future) {
    let mut call = pin!(call);
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(), "it waits for its kernels");
}

#[test]
fn a_call_behind_one_that_was_dropped_does_not_end_before_its_own_kernels() {
    for seed in 0..10 {
        let session = twin(seed, 1, SOC);
        let mut ep = endpoint(&session.table(), Element::Int8, Nanos::from_secs(1), FEW);
        let x = rows(&mut ep);
        let made = block_on(ep.quantize(&x)).expect("rows of INT8");
        let right = ep.bytes(&made).expect("bytes");
        let other = ep.rows(&vec![0x40; (TOKENS * HIDDEN * 2) as usize], TOKENS).expect("rows");
        start_and_drop(ep.quantize(&other));
        let made = block_on(ep.quantize(&x)).expect("rows of INT8");
        assert_eq!(ep.bytes(&made).expect("bytes"), right, "seed {seed}");
        drop((ep, x, other, made));
        assert_eq!(session.fault(), None, "seed {seed}");
    }
}

/// A stream of the user's holds up the call that is dropped, and the next one.
#[test]
fn what_a_dropped_call_has_launched_keeps_its_parameters() {
    for seed in 0..10 {
        let session = twin(seed, 1, SOC);
        let mut ep = endpoint(&session.table(), Element::Int8, Nanos::from_secs(1), FEW);
        let device = ep.stream().device().clone();
        let blocks = [0, 1].map(|_| Memory::zeroed(&device, 1 << 16).expect("memory"));
        let users = Users(Stream::new(&device).expect("a stream"));
        let x = rows(&mut ep);
        let coded = block_on(ep.quantize(&x)).expect("rows of INT8");
        let routing = all_to_expert_1(&mut ep, TOKENS);
        let received = block_on(ep.dispatch(&coded, &routing)).expect("rows");
        let combined = block_on(ep.combine(&x, &received.handle, Combine::default())).expect("sums");
        let right = ep.bytes(&combined.x).expect("bytes");
        for _ in 0..50 {
            // SAFETY: both blocks have so many bytes, and live until the stream is done with them.
            unsafe { users.0.copy(blocks[0].address(), blocks[1].address(), 1 << 16) }.expect("a copy");
        }
        // SAFETY: the stream is of this device, and lives longer than the endpoint.
        unsafe { ep.follow(users.0.lend()) }.expect("an order");
        start_and_drop(ep.quantize(&x));
        // SAFETY: as above.
        unsafe { ep.lead(users.0.lend()) }.expect("an order");
        // SAFETY: as above.
        unsafe { ep.follow(users.0.lend()) }.expect("an order");
        let combined = block_on(ep.combine(&x, &received.handle, Combine::default())).expect("sums");
        assert_eq!(ep.bytes(&combined.x).expect("bytes"), right, "seed {seed}");
        drop((ep, x, coded, received, combined, blocks));
        assert_eq!(session.fault(), None, "seed {seed}");
    }
}

/// The rank itself is named: no core of it came to the end of the launch.
fn is_named(error: Error) {
    let Error::Failed(failure) = error else { panic!("{error}") };
    assert!(matches!(failure.fault, Fault::PeerGone { .. }) && failure.culprit.0 == 0, "{failure}");
}

/// Of a deadline so short that a core does not find its positions in time.
#[test]
fn positions_that_come_late_fail_the_call() {
    let mut late = 0;
    for nanos in [200, 1_000, 5_000, 20_000, 50_000] {
        let session = twin(3, 1, SOC);
        let roles = Roles { senders: 5, coordinators: 1, forwarders: 0, forwarder_coordinators: 0, receivers: 5 };
        let mut ep = endpoint(&session.table(), Element::Bf16, Nanos(nanos), roles);
        let x = ep.rows(&vec![0x40; 1500 * 2 * HIDDEN as usize], 1500).expect("rows");
        let routing = all_to_expert_1(&mut ep, 1500);
        match block_on(ep.dispatch(&x, &routing)) {
            Ok(received) => assert_eq!(received.rows, 1500, "after {nanos} ns"),
            Err(error) => {
                late += u32::from(matches!(&error, Error::Failed(failure) if failure.fault.gone().is_some()));
                assert!(matches!(block_on(ep.dispatch(&x, &routing)), Err(Error::Poisoned { .. })), "{error}");
            }
        }
    }
    assert!(late > 0, "no launch found that positions are late");
}

/// Of a library that says of work that has crashed what it says of work that has ended, as ACL does of streams that go on.
#[test]
fn a_kernel_that_crashes_is_not_taken_for_one_that_ended() {
    extern "C" fn as_before(_: *mut std::ffi::c_void, _: u64) -> i32 {
        0
    }
    for stops in [true, false] {
        let session = twin(1, 1, SOC);
        let table = session.table();
        let table = if stops { table } else { Table { set_failure_mode: Some(as_before), ..table } };
        let mut ep = endpoint(&table, Element::Bf16, Nanos::from_secs(1), FEW);
        let device = ep.stream().device().clone();
        let freed = Memory::zeroed(&device, 1 << 16).expect("memory");
        let address = freed.address();
        drop(freed);
        // SAFETY: none: what lies there is nobody's, and the twin's kernel stops at it.
        let x = unsafe { ep.lent_rows(address, TOKENS, 2 * HIDDEN as usize) };
        let routing = all_to_expert_1(&mut ep, TOKENS);
        let error = block_on(ep.dispatch(&x, &routing)).map(drop).expect_err("a kernel has crashed");
        if stops {
            assert!(error.to_string().contains("ACL_ERROR_RT_VECTOR_CORE_EXCEPTION"), "{error}");
        } else {
            is_named(error);
        }
        std::mem::forget(ep);
        assert!(session.fault().is_some_and(|fault| fault.contains("bounds")));
    }
}

/// A rank that was late is owed rows of memory that its sender's user has taken back: it does not get what lies there now. Rows of the endpoint's own
/// are sent again.
#[test]
fn rows_of_a_user_are_not_sent_again_when_he_has_dropped_the_operation() {
    for lends in [true, false] {
        let session = twin(4, 2, SOC);
        let shape = Shape::builder().experts(2).topk(1).hidden(HIDDEN).max_tokens(4).build().expect("a shape");
        let topology = Topology::new(1, 2).expect("a topology");
        let settings = Settings::builder(&shape, &topology).low_latency(true).deadline(Nanos::from_millis(20)).build();
        let builder = Cluster::builder(topology, library().path()).settings(settings.expect("settings")).roles(FEW);
        let cluster = builder.build(&session.table(), shape).expect("a cluster");
        let [mut a, mut b] = <[AscendEndpoint; 2]>::try_from(cluster.into_endpoints()).expect("two ranks");
        let to = |ep: &mut AscendEndpoint, expert| LowRouting::new(ep.array(&[expert; 2]).expect("choices"), None);
        let row = 2 * HIDDEN as usize;
        let users = Memory::of(a.stream().device(), &vec![7u8; 2 * row]).expect("memory");
        let [from_a, from_b] =
            [(&mut a, 1), (&mut b, 2)].map(|(ep, byte)| ep.rows(&vec![byte; 2 * row], 2).expect("rows"));
        let mut sent_by_b = Vec::new();
        for _ in 0..2 {
            let routing = to(&mut a, 1);
            let sent = block_on(a.send_dispatch(&from_a, &routing)).expect("it is sent");
            let routing = to(&mut b, 0);
            sent_by_b.push(block_on(b.send_dispatch(&from_b, &routing)).expect("it is sent"));
            block_on(a.receive_dispatch(&sent)).expect("rows of B");
        }
        // B has received nothing: both banks are full, and what A sends now waits for the third operation's end.
        let x = if lends {
            // SAFETY: as many bytes of the device as the rows have, until the operation is dropped.
            unsafe { a.lent_rows(users.address(), 2, row) }
        } else {
            a.rows(&vec![7; 2 * row], 2).expect("rows")
        };
        let routing = to(&mut a, 1);
        drop(block_on(a.send_dispatch(&x, &routing)).expect("it is kept for later"));
        drop(x);
        users.write(0, &vec![0xee; 2 * row]).expect("the user's memory is his again");
        for sent in &sent_by_b {
            block_on(b.receive_dispatch(sent)).expect("rows of A");
        }
        let routing = to(&mut b, 0);
        let third = block_on(b.send_dispatch(&from_b, &routing)).expect("it is sent");
        let routing = to(&mut a, 1);
        let fourth = block_on(a.send_dispatch(&from_a, &routing));
        if lends {
            assert!(fourth.is_err() && a.rank().0 == 0, "what is owed is not known any more");
            assert!(block_on(b.receive_dispatch(&third)).is_err(), "rows that nobody sent");
        } else {
            fourth.expect("it is sent");
            let received = block_on(b.receive_dispatch(&third)).expect("rows of A");
            assert_eq!(b.bytes(&received.x).expect("bytes")[..2 * row], vec![7; 2 * row]);
        }
    }
}
