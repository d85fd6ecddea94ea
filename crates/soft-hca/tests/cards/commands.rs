//! Commands and objects: what is refused, and what is said of it.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use soft_hca::abi::{self, UmemIn};
use soft_hca::{Card, Fabric, Link, Model, Mood, QpState, Rule};

use crate::Pair;
use crate::message::{Command, get};
use crate::poster::{Poster, SIGNAL};
use crate::side::{PAGE, Queue, Side};

const BAD_PARAM: u8 = 3;
const BAD_RESOURCE: u8 = 5;
const BAD_STATE: u8 = 0x10;
const BAD_LENGTH: u8 = 0x50;

fn one(link: Link) -> (Fabric, Side) {
    let fabric = Fabric::builder(1, link).seed(11).stepped();
    let side = Side::open(fabric.card(0), link);
    (fabric, side)
}

/// What the card said last, and nothing else.
fn only(card: &Card) -> Rule {
    let complaints = card.take_complaints();
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    complaints[0].rule
}

fn general(side: &Side, command: &Command, outlen: usize) -> (i32, Vec<u8>) {
    let mut out = vec![0; outlen];
    // SAFETY: both messages are as long as they say.
    let result = unsafe {
        let (input, inlen) = (command.0.as_ptr().cast(), command.0.len());
        (side.lib.mlx5dv_devx_general_cmd)(side.context, input, inlen, out.as_mut_ptr().cast(), outlen)
    };
    (result, out)
}

#[test]
fn capabilities_say_what_the_model_has() {
    for (link, ethernet) in [(Link::Ethernet, 1), (Link::InfiniBand, 0)] {
        let (fabric, side) = one(link);
        let ask = |op_mod| general(&side, &Command::new(0x100, 16).set(0x30, 16, op_mod), 0x1010);
        let (result, out) = ask(1);
        assert_eq!(result, 0);
        let cap = &out[16..];
        let fields = [(0x88, 8, 15), (0xc8, 8, 22), (0xe8, 1, 1), (0x1b6, 2, ethernet), (0x1fc, 4, 1)];
        let flags =
            [(0x21d, 1, ethernet), (0x21e, 1, 1), (0x220, 1, 1), (0x23f, 1, 1), (0x260, 1, 1), (0x290, 16, 1024)];
        for (at, width, value) in fields.into_iter().chain(flags) {
            assert_eq!(get(cap, at, width), value, "bit {at:#x}");
        }
        let (result, out) = ask(3 << 1 | 1);
        assert_eq!((result, get(&out[16..], 0x90, 16), get(&out[16..], 0xb0, 16)), (0, 3, 8));
        assert_eq!((ask(0x7f).0, only(&side.card)), (121, Rule::Command));
        side.close();
        drop(fabric);
    }
}

/// Each field of CREATE_CQ and CREATE_QP, wrong alone, is refused; right, all are taken.
#[test]
fn a_wrong_field_is_refused() {
    let (fabric, side) = one(Link::Ethernet);
    let queue = side.prepare(4, 4, false);
    let cq = side.create_cq(&queue);
    let wrong: [(usize, usize, u128, u8, Rule); 14] = [
        (0x10, 16, 7, BAD_PARAM, Rule::Command),
        (0x30, 16, 1, BAD_PARAM, Rule::Command),
        (0x86, 1, 0, BAD_PARAM, Rule::Command),
        (0x88, 3, 1, BAD_PARAM, Rule::Command),
        (0xa0, 32, 1, BAD_RESOURCE, Rule::Unknown),
        (0xe3, 5, 23, 8, Rule::Command),
        (0xe3, 5, 10, BAD_RESOURCE, Rule::Memory),
        (0xe8, 24, 1, BAD_RESOURCE, Rule::Unknown),
        (0x138, 8, 0, BAD_RESOURCE, Rule::Unknown),
        (0x143, 5, 9, BAD_PARAM, Rule::Command),
        (0x240, 64, 4, BAD_PARAM, Rule::Command),
        (0x280, 64, 64, BAD_PARAM, Rule::Command),
        (0x2c0, 32, 1, BAD_RESOURCE, Rule::Unknown),
        (0x2e0, 1, 0, BAD_PARAM, Rule::Command),
    ];
    for (at, width, value, status, rule) in wrong {
        let refused = side.create(&cq.clone().set(at, width, value)).expect_err("refused");
        assert_eq!((refused.0, only(&side.card)), (status, rule), "bit {at:#x}");
        assert_ne!(refused.1, 0, "a syndrome");
    }
    let (object, cqn) = side.create(&cq).expect("a completion queue");
    let qp = side.create_qp(&queue, cqn);
    let wrong: [(usize, usize, u128, u8, Rule); 18] = [
        (0x80, 32, 1, BAD_PARAM, Rule::Command),
        (0xc8, 8, 3, BAD_PARAM, Rule::Command),
        (0xe8, 24, 1, BAD_RESOURCE, Rule::Unknown),
        (0x109, 4, 2, BAD_PARAM, Rule::Command),
        (0x110, 1, 1, BAD_PARAM, Rule::Command),
        (0x111, 4, 12, BAD_RESOURCE, Rule::Memory),
        (0x128, 24, 1, BAD_RESOURCE, Rule::Unknown),
        (0x140, 2, 1, BAD_PARAM, Rule::Command),
        (0x4a8, 24, 0, BAD_RESOURCE, Rule::Unknown),
        (0x5a8, 24, 1, BAD_RESOURCE, Rule::Unknown),
        (0x5c0, 64, 12, BAD_PARAM, Rule::Command),
        (0x625, 3, 0, BAD_PARAM, Rule::Command),
        (0x628, 24, 9, BAD_PARAM, Rule::Command),
        (0x743, 1, 0, BAD_PARAM, Rule::Command),
        (0x7e0, 32, 0, BAD_RESOURCE, Rule::Unknown),
        (0x800, 64, 64, BAD_PARAM, Rule::Command),
        (0x840, 32, 0, BAD_RESOURCE, Rule::Unknown),
        (0x860, 1, 0, BAD_PARAM, Rule::Command),
    ];
    for (at, width, value, status, rule) in wrong {
        let refused = side.create(&qp.clone().set(at, width, value)).expect_err("refused");
        assert_eq!((refused.0, only(&side.card)), (status, rule), "bit {at:#x}");
    }
    let (made, _) = side.create(&qp).expect("a queue pair");
    destroy(&side, made);
    destroy(&side, object);
    free(&side, queue);
    side.close();
    drop(fabric);
}

fn destroy(side: &Side, object: *mut abi::Obj) {
    // SAFETY: a live object.
    assert_eq!(unsafe { (side.lib.mlx5dv_devx_obj_destroy)(object) }, 0);
}

fn free(side: &Side, queue: Queue) {
    // SAFETY: nothing uses them any more.
    unsafe {
        (side.lib.mlx5dv_devx_free_uar)(queue.uar);
        assert_eq!((side.lib.mlx5dv_devx_umem_dereg)(queue.umem), 0);
    }
}

#[test]
fn lengths_and_opcodes_are_checked() {
    let (_fabric, side) = one(Link::Ethernet);
    let queue = side.prepare(4, 4, true);
    let mut short = side.create_cq(&queue);
    short.0.truncate(0x10c);
    assert_eq!((side.create(&short).expect_err("too short").0, only(&side.card)), (BAD_LENGTH, Rule::Command));
    assert_eq!(
        (side.create(&Command::new(0xa08, 0x110)).expect_err("no such command").0, only(&side.card)),
        (2, Rule::Command)
    );
    free(&side, queue);
    side.close();
}

/// Entries that are not ffh, and records that are not zero.
#[test]
fn memory_that_was_not_prepared_is_refused() {
    let (_fabric, mut side) = one(Link::Ethernet);
    let queue = side.prepare(4, 4, true);
    queue.arena.write(PAGE + 5 * 64 + 63, &[0]);
    assert_eq!((side.create(&side.create_cq(&queue)).is_err(), only(&side.card)), (true, Rule::Filled));
    queue.arena.write(PAGE + 5 * 64 + 63, &[0xff]);
    free(&side, queue);
    let place = side.add_queue(4, 4, true);
    let queue = &side.queues[place];
    queue.arena.word(4).store(7, Ordering::Relaxed);
    for (command, outcome) in [
        (Side::init(queue.number), Ok(())),
        (side.rtr(queue.number, &side, queue.number), Ok(())),
        (Side::rts(queue.number), Err(BAD_PARAM)),
    ] {
        assert_eq!(side.modify(queue.qp, &command), outcome);
    }
    assert_eq!(only(&side.card), Rule::Filled);
    side.close();
}

#[test]
fn transitions_come_in_their_order_with_their_fields() {
    for link in [Link::Ethernet, Link::InfiniBand] {
        let pair = Pair::new(link, Mood::mild(), 2, 1, 4, 4, true);
        let (a, b) = (&pair.a, &pair.b);
        let (qp, number, remote) = (a.queues[0].qp, a.queues[0].number, b.queues[0].number);
        let reset = Command::new(0x50a, 16).set(0x48, 24, number.into());
        let (init, rtr, rts) = (Side::init(number), a.rtr(number, b, remote), Side::rts(number));
        let state = || a.card.queue_pairs()[0].state;
        assert_eq!(state(), QpState::ReadyToSend);
        for out_of_order in [&init, &rtr, &rts] {
            assert_eq!((a.modify(qp, out_of_order), only(&a.card)), (Err(BAD_STATE), Rule::State));
        }
        assert_eq!(a.modify(qp, &reset), Ok(()));
        for out_of_order in [&rtr, &rts] {
            assert_eq!((a.modify(qp, out_of_order), only(&a.card)), (Err(BAD_STATE), Rule::State));
        }
        for (at, width, value) in
            [(0x48, 24, 1), (0xd3, 2, 0), (0x190, 16, 1), (0x2a8, 8, 2), (0x54c, 4, 1), (0x80, 32, 1 << 31)]
        {
            assert_eq!(
                (a.modify(qp, &init.clone().set(at, width, value)), only(&a.card)),
                (Err(BAD_PARAM), Rule::Command),
                "bit {at:#x}"
            );
        }
        assert_eq!((a.modify(qp, &init), state()), (Ok(()), QpState::Init));
        let routed: &[(usize, usize, u128)] = match link {
            Link::Ethernet => &[(0x1c8, 8, 2), (0x1d8, 8, 0), (0x200, 128, 0), (0x290, 16, 7), (0x2b0, 48, 0)],
            Link::InfiniBand => &[(0x1b0, 16, 0)],
        };
        for &(at, width, value) in
            [(0x100, 3, 0), (0x100, 3, 6), (0x103, 5, 0), (0x103, 5, 31), (0x168, 24, 0)].iter().chain(routed)
        {
            assert_eq!(a.modify(qp, &rtr.clone().set(at, width, value)), Err(BAD_PARAM), "bit {at:#x}");
            a.card.take_complaints();
        }
        assert_eq!((a.modify(qp, &rtr), state()), (Ok(()), QpState::ReadyToReceive));
        assert_eq!((a.modify(qp, &rts), state()), (Ok(()), QpState::ReadyToSend));
        let broken = Command::new(0x507, 16).set(0x48, 24, number.into());
        assert_eq!((a.modify(qp, &broken), state()), (Ok(()), QpState::Error));
        pair.close();
    }
}

/// What commands have set is answered, at the same places.
#[test]
fn a_queue_pair_answers_what_it_was_told() {
    let pair = Pair::new(Link::Ethernet, Mood::mild(), 2, 1, 4, 4, true);
    let (a, remote) = (&pair.a, pair.b.queues[0].number);
    let ask = Command::new(0x50b, 16).set(0x48, 24, a.queues[0].number.into());
    let mut out = [0; 0x110];
    // SAFETY: both messages are as long as they say.
    let result = unsafe {
        (a.lib.mlx5dv_devx_obj_query)(a.queues[0].qp, ask.0.as_ptr().cast(), 16, out.as_mut_ptr().cast(), out.len())
    };
    assert_eq!(result, 0);
    let fields = [(0xc0, 4, 3), (0xe8, 24, a.pdn), (0x111, 4, 4), (0x148, 24, 0xabcde), (0x168, 24, remote)];
    let more =
        [(0x290, 16, 0xc0de), (0x1c0, 5, 8), (0x44d, 3, 7), (0x488, 24, 0x123), (0x568, 24, 0x123), (0x54c, 4, 3)];
    for (at, width, value) in fields.into_iter().chain(more) {
        assert_eq!(get(&out, at, width), value.into(), "bit {at:#x}");
    }
    pair.close();
}

/// What is still in use is not given back.
#[test]
fn the_order_of_destruction_is_kept() {
    let pair = Pair::new(Link::InfiniBand, Mood::mild(), 2, 1, 4, 4, true);
    let (a, lib, queue) = (&pair.a, &pair.a.lib, &pair.a.queues[0]);
    // SAFETY: all pointers are live, and stay so: each call is refused.
    unsafe {
        assert_eq!(((lib.mlx5dv_devx_umem_dereg)(queue.umem), only(&a.card)), (16, Rule::Destroy));
        assert_eq!(((lib.mlx5dv_devx_obj_destroy)(queue.cq), only(&a.card)), (16, Rule::Destroy));
        (lib.mlx5dv_devx_free_uar)(queue.uar);
        assert_eq!(only(&a.card), Rule::Destroy);
        assert_eq!(((lib.ibv_dereg_mr)(a.rows_mr), only(&a.card)), (16, Rule::Destroy));
        assert_eq!(((lib.ibv_dealloc_pd)(a.pd), only(&a.card)), (16, Rule::Destroy));
        assert_eq!(((lib.ibv_close_device)(a.context), only(&a.card)), (16, Rule::Destroy));
    }
    pair.close();
}

/// A pointer that was given back, or is another kind's, is refused.
#[test]
fn a_stray_pointer_is_refused() {
    let (_fabric, side) = one(Link::Ethernet);
    // SAFETY: pointers that stand for nothing are looked up and not followed.
    unsafe {
        let pd = (side.lib.ibv_alloc_pd)(side.context);
        assert_eq!((side.lib.ibv_dealloc_pd)(pd), 0);
        assert_eq!((side.lib.ibv_dealloc_pd)(pd), 22);
        assert_eq!((side.lib.ibv_dereg_mr)(side.pd.cast()), 22);
        assert!((side.lib.ibv_reg_mr)(pd, side.rows.at(0), 64, 1).is_null());
    }
    assert!(soft_hca::stray_pointers().len() >= 3);
    side.close();
}

/// Cards are listed while their fabric lives; a device that nobody holds any more is refused.
#[test]
fn a_device_goes_with_its_fabric() {
    let lib = crate::library::Library::new();
    let fabric = Fabric::builder(1, Link::Ethernet).stepped();
    let name = fabric.card(0).name();
    // SAFETY: the list ends with a null pointer, and names are read while it holds the devices.
    let names = || unsafe {
        let list = (lib.ibv_get_device_list)(std::ptr::null_mut());
        let (mut names, mut device) = (Vec::new(), list);
        while !(*device).is_null() {
            names.push(std::ffi::CStr::from_ptr((lib.ibv_get_device_name)(*device)).to_str().unwrap().to_owned());
            device = device.add(1);
        }
        (lib.ibv_free_device_list)(list);
        names
    };
    assert!(names().contains(&name));
    drop(fabric);
    assert!(!names().contains(&name));
}

/// A bell that was rung before its queue pair went is that queue pair's, whether the card has looked at it by then or not.
#[test]
fn a_bell_comes_before_the_end_of_its_queue_pair() {
    let (fabric, side) = one(Link::Ethernet);
    let queue = side.prepare(4, 4, true);
    let (cq, cqn) = side.create(&side.create_cq(&queue)).expect("a completion queue");
    let (qp, number) = side.create(&side.create_qp(&queue, cqn)).expect("a queue pair");
    let ring = || {
        let bell = u64::from_ne_bytes(*[[0; 4], (number << 8).to_be_bytes()].concat().first_chunk().unwrap());
        // SAFETY: a live page; the register lies there.
        unsafe { (*queue.uar).reg_addr.cast::<u64>().write_volatile(bell) };
    };
    ring();
    destroy(&side, qp);
    fabric.step();
    assert_eq!(side.card.take_complaints(), []);
    ring();
    fabric.step();
    assert_eq!(only(&side.card), Rule::Bell, "of one that is gone");
    destroy(&side, cq);
    free(&side, queue);
    side.close();
}

/// A bell that was rung before its queue pair was reset is forgotten with all else: it is of no life that comes after.
#[test]
fn a_bell_comes_before_the_reset_of_its_queue_pair() {
    for lives in [1, 2] {
        let pair = Pair::new(Link::Ethernet, Mood::mild(), 2, 1, 4, 4, true);
        let (a, queue) = (&pair.a, &pair.a.queues[0]);
        let mut poster = Poster::new(None);
        poster.element(queue, 0, SIGNAL, &[]);
        poster.ring(queue);
        reset(a, queue);
        if lives == 2 {
            queue.arena.word(4).store(0, Ordering::Release);
            a.connect(0, &pair.b);
        }
        pair.fabric.settle();
        assert_eq!(a.card.take_complaints(), [], "{lives}");
        assert_eq!(a.card.queue_pairs()[0].produced, 0, "{lives}");
        pair.close();
    }
}

/// A bell may hide another of the same page: but not of a queue pair that was reset, whose record is still that of its last life.
#[test]
fn a_bell_says_nothing_of_a_neighbour_that_was_reset() {
    let pair = Pair::with(Link::Ethernet, Mood::mild(), 2, (2, 4, 4), true, 1);
    let a = &pair.a;
    for queue in &a.queues {
        let mut poster = Poster::new(None);
        poster.element(queue, 0, SIGNAL, &[]);
        poster.ring(queue);
        assert_eq!(poster.drain(&pair.fabric, queue), Ok(true));
        if queue.number == a.queues[0].number {
            reset(a, queue);
        }
    }
    pair.fabric.settle();
    assert_eq!(a.card.take_complaints(), []);
    let mut produced: Vec<u64> = a.card.queue_pairs().iter().map(|view| view.produced).collect();
    produced.sort_unstable();
    assert_eq!(produced, [0, 1]);
    pair.close();
}

fn reset(side: &Side, queue: &Queue) {
    let reset = Command::new(0x50a, 16).set(0x48, 24, queue.number.into());
    assert_eq!(side.modify(queue.qp, &reset), Ok(()));
}

/// A bell beside the register is none, and is told when the page goes.
#[test]
fn a_bell_beside_the_register_is_told() {
    let (_fabric, side) = one(Link::Ethernet);
    let queue = side.prepare(4, 4, true);
    // SAFETY: a live page of 4096 bytes.
    unsafe { (*queue.uar).base_addr.cast::<u64>().add(0x900 / 8).write_volatile(7) };
    free(&side, queue);
    assert_eq!(only(&side.card), Rule::Bell);
    side.close();
}

/// A dmabuf's descriptor may be closed once it is registered.
#[test]
fn a_dmabuf_is_registered() {
    let (_fabric, side) = one(Link::Ethernet);
    let file = tempfile::tempfile().unwrap();
    file.set_len(4 * PAGE as u64).unwrap();
    let fd = file.as_raw_fd();
    let mut input = UmemIn {
        addr: PAGE as *mut _,
        size: 3 * PAGE,
        access: 1,
        pgsz_bitmap: 0,
        comp_mask: abi::UMEM_MASK_DMABUF,
        dmabuf_fd: fd,
    };
    // SAFETY: the descriptor is open during the calls that take it.
    unsafe {
        let mr = (side.lib.ibv_reg_dmabuf_mr)(side.pd, 0, 2 * PAGE, 0x7000, fd, 7);
        let umem = (side.lib.mlx5dv_devx_umem_reg_ex)(side.context, &mut input);
        input.size = 4 * PAGE;
        assert!((side.lib.mlx5dv_devx_umem_reg_ex)(side.context, &mut input).is_null(), "beyond the end");
        assert!(!mr.is_null() && !umem.is_null());
        drop(file);
        assert_eq!((side.lib.ibv_dereg_mr)(mr), 0);
        assert_eq!((side.lib.mlx5dv_devx_umem_dereg)(umem), 0);
    }
    side.close();
}

/// A card without firmware commands opens all the same where nobody insists, and says so at the first command.
#[test]
fn what_a_model_lacks_fails() {
    let model = Model { devx: false, ..Model::new(Link::Ethernet) };
    let fabric = Fabric::builder(1, Link::Ethernet).model(model).stepped();
    let lib = crate::library::Library::new();
    // SAFETY: pointers come from the functions themselves.
    unsafe {
        let list = (lib.ibv_get_device_list)(std::ptr::null_mut());
        let mut device = list;
        let name = fabric.card(0).name();
        while std::ffi::CStr::from_ptr((lib.ibv_get_device_name)(*device)).to_str() != Ok(&name) {
            device = device.add(1);
        }
        let mut attr = abi::ContextAttr { flags: abi::CONTEXT_FLAGS_DEVX, comp_mask: 0 };
        assert!((lib.mlx5dv_open_device)(*device, &mut attr).is_null());
        let context = (lib.ibv_open_device)(*device);
        (lib.ibv_free_device_list)(list);
        assert!(!context.is_null());
        assert!((lib.mlx5dv_devx_alloc_uar)(context, 0).is_null());
        assert_eq!((lib.ibv_close_device)(context), 0);
    }
    assert_eq!(fabric.complaints(), []);
}

#[test]
fn functions_fail_on_demand() {
    let (_fabric, side) = one(Link::Ethernet);
    side.card.fail("ibv_alloc_pd", 1, 12);
    let queue = side.prepare(4, 4, true);
    side.card.refuse(0x400, 0, 0xf, 0xbeef);
    assert_eq!(side.create(&side.create_cq(&queue)), Err((0xf, 0xbeef)));
    let (cq, _) = side.create(&side.create_cq(&queue)).expect("once only");
    destroy(&side, cq);
    free(&side, queue);
    // SAFETY: a live context.
    unsafe {
        let pd = (side.lib.ibv_alloc_pd)(side.context);
        assert!((side.lib.ibv_alloc_pd)(side.context).is_null(), "the one after the first");
        assert_eq!((side.lib.ibv_dealloc_pd)(pd), 0);
    }
    side.close();
}
