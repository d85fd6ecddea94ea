//! The rules that kernels share with roles are the same in C++: cursors of rings, whom to blame, which message is refused. And a header that
//! says something else than the Rust code does not compile.

use std::fmt::Write;

use ep_core::blame::{Wait, culprit, origin};
use ep_core::device::{EPOCH, Early, Local, Low, headers};
use ep_core::layout::{Alarm, Difference, OpHeader, RowHeader};
use ep_core::port::{Tag, UNIT_DATA, pack_unit, unit_bytes, unit_count};
use ep_core::ring::{Consumer, Geometry, Producer};
use ep_core::{Phase, Rank, Topology};
use rand::{Rng, RngCore, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::common::cpp;

const HEAD: &str = "#include \"ep_protocol.h\"\nextern \"C\" int printf(const char*, ...);\n\
                    static void out(ep_u64 value) { printf(\"%llu\\n\", value); }\n";

fn random() -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(17)
}

/// Both ends of a ring, driven by drawn steps: what each says after each step.
#[test]
fn rings_have_the_cursors_of_the_roles() {
    let mut draw = random();
    let (mut program, mut expected) = (format!("{HEAD}int main() {{\n"), Vec::new());
    for _ in 0..40 {
        let slots = draw.random_range(1..9u32);
        let [chunk, credit] = [(); 2].map(|()| draw.random_range(1..=slots));
        let geometry = Geometry { slots, chunk, credit };
        let (mut producer, mut consumer) = (Producer::new(geometry), Consumer::new(geometry));
        let _ = write!(
            program,
            "{{ EpRings r = {{1u, {slots}u, {chunk}u, {credit}u, 0u, 0u, 0u, 0u}};\n\
             EpProducer p = ep_producer_at(0); EpConsumer c = ep_consumer_at(0);\n"
        );
        for _ in 0..60 {
            let steps = match draw.next_u32() % 3 {
                0 if producer.slot().is_some() => {
                    let slot = producer.slot().expect("there is room");
                    let due = producer.push();
                    // Published at once where it is due, as ends of rings do.
                    expected.extend([u64::from(slot), due.is_some().into()]);
                    "out(ep_producer_slot(p, r)); { bool due = ep_producer_push(p, r); out(due); if (due) p.published = p.tail; }\n"
                        .to_owned()
                }
                1 if consumer.slot().is_some() => {
                    let slot = consumer.slot().expect("there is a row");
                    let due = consumer.pop();
                    expected.extend([u64::from(slot), due.is_some().into()]);
                    "out(ep_consumer_slot(c, r)); { bool due = ep_consumer_pop(c, r); out(due); if (due) c.returned = c.head; }\n"
                        .to_owned()
                }
                _ => {
                    // What was published, or a count that no peer can have.
                    let wild = u64::from(draw.next_u32() % 4);
                    let (head, tail) = (consumer.head() + wild, producer.tail() + wild);
                    expected.extend([producer.saw_head(head).is_ok(), consumer.saw_tail(tail).is_ok()].map(u64::from));
                    // The limits that errors name; then what each end may do.
                    format!("out(ep_producer_saw(p, {head}ull)); out(ep_consumer_saw(c, r, {tail}ull));\n")
                }
            };
            program += &steps;
            expected.extend([u64::from(producer.slot().is_none()), producer.awaited_head()]);
            expected.push(consumer.slot().is_some().into());
            program += "out(ep_producer_is_full(p, r)); out(ep_producer_awaits(p, r)); out(ep_consumer_has_row(c));\n";
        }
        program += "}\n";
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}

/// What a rank has said, as the alarm that its peers see.
fn alarm(wait: Wait) -> u64 {
    let Wait { op, phase, in_circle, peer } = wait;
    Alarm { serial: 3, verdict: false, op: Alarm::op_bits(op), phase, in_circle, peer }.encode()
}

/// The peer of a wait as kernels have it.
fn whom(wait: Wait) -> u32 {
    wait.peer.0 | u32::from(wait.in_circle) << 15
}

#[test]
fn all_blame_the_same_rank() {
    let mut draw = random();
    let (mut program, mut expected) = (format!("{HEAD}int main() {{\n"), Vec::new());
    for _ in 0..400 {
        let ranks = draw.random_range(2..9u32);
        let (me, op) = (draw.random_range(0..ranks), draw.random_range(5..9000u64));
        let mut wait = |of: u32| {
            let peer = (of + draw.random_range(1..ranks)) % ranks;
            let phase = Phase::ALL[draw.random_range(0..6)];
            let in_circle = draw.random_bool(0.2);
            Wait { op: op - draw.random_range(0..3u64), phase, in_circle, peer: Rank(peer) }
        };
        let own = wait(me);
        let others = (0..ranks).filter(|rank| *rank != me);
        let drawn: Vec<_> = others.map(|rank| (Rank(rank), wait(rank))).collect();
        let said: Vec<_> = drawn.into_iter().filter(|_| draw.random_bool(0.7)).collect();
        let all: Vec<_> = said.iter().copied().chain([(Rank(me), own)]).collect();
        expected.push(u64::from(culprit(&all, |_, _| true, own).0));
        // Over several nodes not everybody hears everybody.
        let heard = draw.next_u32();
        let hears = |rank: Rank, peer: Rank| heard >> (3 * rank.0 + peer.0) & 1 == 1;
        expected.push(u64::from(culprit(&all, hears, own).0));
        let from = origin(&said, Rank(me), own);
        expected.extend([from.op, from.phase as u64, from.peer.0.into(), from.in_circle.into()]);
        let mut alarms = vec![0; ranks as usize];
        said.iter().for_each(|(rank, wait)| alarms[rank.index()] = alarm(*wait));
        let list = alarms.iter().map(|alarm| format!("{alarm}ull,")).collect::<String>();
        let Wait { op: own_op, phase, peer, .. } = own;
        let whom = whom(own);
        let _ = writeln!(
            program,
            "{{ const ep_u64 alarms[] = {{{list}}}; const ep_u64 told = ep_wait_key({own_op}ull, {}u, {whom}u);\n\
             const auto wait_of = [&](ep_u32 rank) {{ return rank == {me}u ? ep_wait_of_key({ranks}u, rank, {op}ull, told) \
             : ep_wait_of_alarm({ranks}u, rank, {op}ull, alarms[rank]); }};\n\
             out(ep_culprit({ranks}u, {peer}u, wait_of));\n\
             out(ep_culprit({ranks}u, {peer}u, wait_of, [](ep_u32 rank, ep_u32 peer) {{ return {heard}u >> (3 * rank + peer) & 1; }}));\n\
             const ep_u64 from = ep_key_of_wait({op}ull, ep_wait_origin({ranks}u, {me}u, wait_of({me}u), wait_of));\n\
             out(ep_key_op(from)); out(ep_key_phase(from)); out(ep_key_peer(from)); out((ep_key_whom(from) & EP_IN_CIRCLE) != 0); }}",
            phase as u32
        );
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}

#[test]
fn the_same_ranks_hear_each_other() {
    let (mut program, mut expected) = (format!("{HEAD}int main() {{\n"), Vec::new());
    for (nodes, ranks) in [(1, 4), (2, 3), (3, 1), (4, 2)] {
        let topology = Topology::new(nodes, ranks).expect("it is small");
        for (one, other) in topology.all().flat_map(|one| topology.all().map(move |other| (one, other))) {
            if one != other {
                expected.push(topology.are_neighbours(one, other).into());
                let _ = writeln!(program, "out(ep_are_neighbours({ranks}u, {one}u, {other}u));");
            }
        }
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}

#[test]
fn waits_are_ordered_as_roles_order_them() {
    let mut draw = random();
    let (mut program, mut expected) = (format!("{HEAD}int main() {{\n"), Vec::new());
    for _ in 0..300 {
        let mut wait = || {
            let phase = Phase::ALL[draw.random_range(0..9)];
            let (op, in_circle) = (draw.random_range(7..12u64), draw.random_bool(0.3));
            Wait { op, phase, in_circle, peer: Rank(draw.random_range(0..9u32)) }
        };
        let [one, other] = [wait(), wait()];
        let key = |wait: Wait| format!("ep_wait_key({}ull, {}u, {}u)", wait.op, wait.phase as u32, whom(wait));
        expected.extend([one.op, one.phase as u64, one.peer.0.into()]);
        let _ = writeln!(
            program,
            "{{ const ep_u64 key = {}; out(ep_key_op(key)); out(ep_key_phase(key)); out(ep_key_peer(key)); }}",
            key(one)
        );
        // Keys of one operation, and what is compared of two ranks' words, are in the order of waits.
        if one.op == other.op {
            expected.push((one < other).into());
            let _ = writeln!(program, "out({} > {});", key(one), key(other));
        }
        let word = |wait: Wait| format!("ep_wait_of_alarm(9u, 9u, 9ull, {}ull)", alarm(wait));
        expected.push((one < other).into());
        let _ = writeln!(program, "out({} < {});", word(one), word(other));
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}

/// Field, own and other value of a difference, as C++ prints them; EP_SAME for none.
fn numbers(difference: Option<Difference>) -> [u64; 3] {
    difference.map_or([0xffff_ffff, 0, 0], |Difference { field, mine, theirs }| [field as u64, mine, theirs])
}

#[test]
fn the_same_messages_are_refused() {
    let mut draw = random();
    let (mut program, mut expected) = (
        format!(
            "{HEAD}static void tell(EpDifference d) {{ out(d.field); out(d.mine); out(d.theirs); }}\nint main() {{\n"
        ),
        Vec::new(),
    );
    for _ in 0..200 {
        let mut few = || draw.next_u32() % 2;
        let mut header = || OpHeader {
            op: few().into(),
            kind: few(),
            rows: few(),
            settings: few().into(),
            first: few(),
            reserved: 0,
        };
        let [mine, theirs] = [header(), header()];
        expected.extend(numbers(mine.compare(&theirs)));
        let text = |h: OpHeader| {
            format!("EpOpHeader{{{}ull, {}u, {}u, {}ull, {}u, 0u}}", h.op, h.kind, h.rows, h.settings, h.first)
        };
        let _ = writeln!(program, "tell(ep_compare_headers({}, {}));", text(mine), text(theirs));
        let mut row = || RowHeader { source_rank: few(), source_token: few(), position: few(), op: few() };
        let [due, came] = [row(), row()];
        expected.extend(numbers(due.compare(&came)));
        let text = |h: RowHeader| {
            format!("EpRowHeader{{{}u, {}u, {}u, {}u}}", h.source_rank, h.source_token, h.position, h.op)
        };
        let _ = writeln!(program, "tell(ep_compare_rows({}, {}));", text(due), text(came));
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}

/// Faults planted in one side only: the compiler finds each.
#[test]
fn a_header_that_differs_from_rust_does_not_compile() {
    let Some(compiler) = cpp::compiler() else { return };
    let program = "#include \"ep_protocol.h\"\nint main() {}\n";
    assert_eq!(cpp::compile(&compiler, program, &headers()).err(), None);
    let swapped =
        |text: &str, [one, other]: [&str; 2]| text.replace(one, "\u{1}").replace(other, one).replace('\u{1}', other);
    for (struct_name, fields) in [
        ("EpLocal", ["ep_u32 failed;", "ep_u32 arrived[4];"]),
        ("EpLow", ["ep_u32 broken;", "ep_u32 failed;"]),
        ("EpReport", ["ep_u64 seen;", "ep_u64 awaited;"]),
        ("EpRank", ["ep_u64 windows;", "ep_u64 local;"]),
        ("EpBlockRole", ["ep_u32 task;", "ep_u32 index;"]),
        ("EpLowRoles", ["ep_u32 tells;", "ep_u32 tellers;"]),
        ("EpWindow", ["ep_u64 low_slots;", "ep_u64 low_part_slots;"]),
        ("EpRowHeader", ["ep_u32 position;", "ep_u32 op;"]),
    ] {
        let edited = headers().map(|(name, text)| {
            let edited = match text.find(&format!("struct {struct_name} {{")) {
                Some(begin) => {
                    let end = begin + text[begin..].find("};").expect("a struct ends");
                    let body = swapped(&text[begin..end], fields);
                    assert_ne!(body, text[begin..end], "{struct_name} has {fields:?}");
                    [&text[..begin], &body, &text[end..]].concat()
                }
                None => text,
            };
            (name, edited)
        });
        let said = cpp::compile(&compiler, program, &edited).err().unwrap_or_default();
        assert!(said.contains(&format!("\"{struct_name}.")) || said.contains(struct_name), "{struct_name}: {said}");
    }
}

/// Words behind the structs: the host writes them where the kernels read them. Were one stride another, the wrong rank would be gone.
#[test]
fn what_lies_behind_the_structs_is_where_the_host_writes() {
    let (mut program, mut expected) = (format!("{HEAD}int main() {{\n"), Vec::new());
    for (ranks, rank, op) in [(1, 0, 1), (3, 2, 4), (8, 5, 7)] {
        let late = Low::late(ranks, op) + 4 * rank as usize;
        let low = [late, Low::gone(ranks, Rank(rank)), Low::taken(ranks, rank)];
        expected.extend([Local::gone(Rank(rank))].into_iter().chain(low).map(|at| at as u64));
        let _ = write!(
            program,
            "out(ep_gone_at(0, {rank}u)); out(ep_low_late_at(0, {ranks}u, {op}ull, {rank}u));\n\
             out(ep_low_gone_at(0, {ranks}u, {rank}u)); out(ep_low_taken_at(0, {ranks}u, {rank}u));\n"
        );
        // Of as many counters as ranks.
        let (counters, at) = (ranks as usize, rank as usize);
        let early = [Early::arrived(at), Early::expected(counters, at), Early::ready(counters, at)];
        expected.extend(early.into_iter().map(|at| at as u64).chain([EPOCH]));
        let _ = write!(
            program,
            "out(ep_early_arrived_at(0, {rank}u)); out(ep_early_expected_at(0, {ranks}u, {rank}u));\n\
             out(ep_early_ready_at(0, {ranks}u, {rank}u)); out(EP_EPOCH);\n"
        );
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}

/// Counts, tags and words of units; and with them the same payload is packed as roles pack it.
#[test]
fn payloads_are_cut_into_the_same_units() {
    let mut draw = random();
    let (mut program, mut expected) = (format!("{HEAD}int main() {{\n"), Vec::new());
    let mut serials = vec![0, 1, u64::from(u32::MAX) - 1, u64::from(u32::MAX), (1 << 30) - 1, 1 << 30, u64::MAX];
    serials.extend((0..40).map(|_| draw.next_u64()));
    for serial in serials {
        let bytes = draw.random_range(0..5000u64);
        let tag = Tag::of(serial);
        expected.extend([unit_count(bytes), unit_bytes(bytes), tag.bits().into(), Tag::era(serial)]);
        let _ = writeln!(
            program,
            "out(ep_unit_count({bytes}ull)); out(ep_unit_bytes({bytes}ull)); out(ep_unit_tag({serial}ull)); out(ep_unit_era({serial}ull));"
        );
        let count = draw.random_range(1..9);
        let words: Vec<u32> = (0..count).map(|_| draw.next_u32()).collect();
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let list = words.iter().map(|word| format!("{word}u,")).collect::<String>();
        let _ = writeln!(program, "{{ const ep_u32 words[] = {{{list}}}, tag = ep_unit_tag({serial}ull);");
        for (unit, data) in payload.chunks(UNIT_DATA as usize).enumerate() {
            let packed = pack_unit(data, tag);
            let (packed, _) = packed.as_chunks::<4>();
            expected.extend(packed.iter().map(|&word| u64::from(u32::from_le_bytes(word))));
            expected.extend([1, 0]);
            let _ = writeln!(
                program,
                "for (ep_u32 w = 0; w < 3; ++w) out(ep_unit_word(words, {}, {unit}, w));\n\
                 out(tag); out(ep_unit_has_come({}u, tag)); out(ep_unit_has_come(0u, tag));",
                words.len(),
                tag.bits()
            );
        }
        program += "}\n";
    }
    program += "}\n";
    let Some(printed) = cpp::printed(&program) else { return };
    assert_eq!(printed, expected);
}
