//! What no rank of low latency says, and what is refused all the same: here a peer that is played by hand says it.

use crate::common::{A, B, DEADLINE};
use crate::low::{HIDDEN, MAX, RANKS, dispatch, shape};
use ep_core::engine::Engine;
use ep_core::layout::{Arrival, LowKind, low_stamp};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Offset, Port as _, Role, Tag};
use ep_core::{Fault, Settings, Topology};
use ep_sim::{Cluster, Machine, Port};

const SEEDS: u64 = 20;
const PAYLOAD: u64 = HIDDEN as u64 * 2;
/// From rank 1, that is played, to rank 0.
const LANE: LaneId = LaneId { peer: A, kind: LaneKind::LowRows };

/// A row as units: its token, and its number among those of rank 0's expert.
type Row = (u32, u32);
/// What a dispatch refuses: the field, what it should be, and what it is.
type Refused = Option<(&'static str, u32, u32)>;

fn sender(machine: &Machine) -> Port {
    machine.port(Opening { role: Role::new(Duty::Sender), op: 1, generation: 1, deadline: DEADLINE })
}

/// What announces so many rows of the first dispatch.
fn arrival(rows: u32) -> u64 {
    Arrival { op: 1, kind: LowKind::Dispatch, rows }.encode(&shape())
}

fn write(port: &mut Port, to: Offset, words: &[u32]) {
    port.write(to, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
}

/// Puts rows of these tokens into slots, and says that so many have come.
async fn speak(machine: &Machine, tokens: &[u32], rows: u32) -> Result<(), Fault> {
    let (layout, mut port) = (machine.layout(), sender(machine));
    for (position, &token) in (0..).zip(tokens) {
        let from = layout.low_staging(position).offset;
        write(&mut port, from, &[B.0, token, position, low_stamp(1, 1)]);
        let to = layout.low_row(1, B, position).offset;
        port.put(LANE, from.span(layout.row().header_bytes() + PAYLOAD), to).await?;
    }
    port.publish(LANE, Cell::new(B, LANE.kind, Counter::Odd), arrival(rows)).await
}

/// Puts rows as units, and says that rank 0's expert gets so many.
async fn speak_in_units(machine: &Machine, rows: &[Row], said: u32) -> Result<(), Fault> {
    let (layout, mut port, tag) = (machine.layout(), sender(machine), Tag::of(1));
    let come = rows.len() as u32;
    let [head, counts] = [come, come + 1].map(|slot| layout.low_staging(slot).offset);
    write(&mut port, head, &[arrival(come) as u32, (arrival(come) >> 32) as u32, MAX]);
    port.put_units(LANE, head.span(12), layout.low_unit_head(1, B), tag).await?;
    write(&mut port, counts, &[said]);
    port.put_units(LANE, counts.span(4), layout.low_unit_counts(1, B), tag).await?;
    for (position, &(token, number)) in (0..).zip(rows) {
        let header = layout.low_staging(position).offset;
        // Choices: an expert, its weight and the row's number.
        write(&mut port, header, &[B.0, token, low_stamp(1, 1), 0, 0, number, u32::MAX, 0, 0]);
        let bytes = header.span(layout.low_unit_header_bytes());
        port.put_units(LANE, bytes, layout.low_unit_header(1, B, position), tag).await?;
        let payload = header.plus(layout.low_unit_header_bytes()).span(PAYLOAD);
        port.put_units(LANE, payload, layout.low_unit_row(1, B, token.min(MAX - 1)), tag).await?;
    }
    Ok(())
}

/// Rank 1 says that, and rank 0 refuses this of it.
fn check(units: bool, due: Refused, said: impl AsyncFn(&Machine) -> Result<(), Fault>) {
    let topology = Topology::new(1, RANKS).unwrap();
    let settings = Settings::builder(&shape(), &topology).low_latency(true).low_latency_units(units).deadline(DEADLINE);
    let cluster = Cluster::builder(topology).settings(settings.build().unwrap()).deadlines(true);
    for seed in 0..SEEDS {
        let run = cluster.clone().seed(seed).build(shape()).unwrap().run_machines(async |machine: Machine| {
            if machine.rank() == B {
                said(&machine).await.unwrap();
                return None;
            }
            let got = dispatch(&mut Engine::new(machine).unwrap(), (1, 1, LowKind::PerChoice)).await;
            got.err().map(|error| error.failure().expect("a failure").fault)
        });
        let told = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished()[A.index()];
        let due = due.map(|(field, mine, theirs)| {
            let (mine, theirs) = (mine.into(), theirs.into());
            Fault::Mismatch { field, mine, theirs, peer: B }
        });
        assert_eq!(told, due, "seed {seed}");
    }
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let all: Vec<u32> = (0..MAX).collect();
    let (least, beyond, many) = ("least token of the next row", "tokens of a source", "rows of a source");
    let cases: [(&[u32], u32, Refused); 6] = [
        (&all, MAX, None),
        (&[0, 0], 2, Some((least, 1, 0))),
        (&[1, 3, 2], 3, Some((least, 4, 2))),
        (&[MAX], 1, Some((beyond, MAX, MAX))),
        // Its rows would be looked for where those of the next rank lie.
        (&all, MAX + 1, Some((many, MAX, MAX + 1))),
        (&all, 2 * MAX, Some((many, MAX, 2 * MAX))),
    ];
    for (tokens, rows, due) in cases {
        check(false, due, async |machine| speak(machine, tokens, rows).await);
    }
}

#[test]
fn rows_in_units_that_cannot_be_are_refused() {
    let (many, number) = ("rows of an expert", "number of a row of an expert");
    let cases: [(&[Row], u32, Refused); 6] = [
        (&[(0, 0), (2, 1)], 2, None),
        (&[(0, 0), (2, 1)], 1, Some((many, 2, 1))),
        (&[(0, 0), (2, 1)], 3, Some((many, 2, 3))),
        (&[(0, 0), (2, 0)], 2, Some((number, 1, 0))),
        (&[(0, 1)], 1, Some((number, 0, 1))),
        (&[(MAX, 0)], 1, Some(("tokens of a source", MAX, MAX))),
    ];
    for (rows, said, due) in cases {
        check(true, due, async |machine| speak_in_units(machine, rows, said).await);
    }
}
