//! What no rank of low latency says, and what is refused all the same: here a peer that is played by hand says it.

use crate::common::{A, B, DEADLINE};
use crate::low::{HIDDEN, MAX, RANKS, dispatch, shape};
use ep_core::engine::Engine;
use ep_core::layout::{Arrival, LowKind, low_stamp};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Port as _, Role};
use ep_core::{Fault, Settings, Topology};
use ep_sim::{Cluster, Machine};

const SEEDS: u64 = 20;

/// Puts rows of these tokens into rank 0's bank, and says that so many have come.
async fn speak(machine: &Machine, tokens: &[u32], rows: u32) -> Result<(), Fault> {
    let (layout, lane) = (machine.layout(), LaneId { peer: A, kind: LaneKind::LowRows });
    let mut port = machine.port(Opening { role: Role::new(Duty::Sender), op: 1, generation: 1, deadline: DEADLINE });
    for (position, &token) in (0..).zip(tokens) {
        let header = [B.0, token, position, low_stamp(1, 1)];
        let from = layout.low_staging(position).offset;
        port.write(from, &header.map(u32::to_ne_bytes).concat())?;
        let bytes = layout.row().header_bytes() + u64::from(HIDDEN * 2);
        port.put(lane, from.span(bytes), layout.low_row(1, B, position).offset).await?;
    }
    let arrival = Arrival { op: 1, kind: LowKind::Dispatch, rows };
    port.publish(lane, Cell::new(B, lane.kind, Counter::Odd), arrival.encode(layout.shape())).await
}

/// What the dispatch of rank 0 ends with, where rank 1 says that.
fn told(seed: u64, tokens: &[u32], rows: u32) -> Option<Fault> {
    let topology = Topology::new(1, RANKS).unwrap();
    let settings = Settings::builder(&shape(), &topology).low_latency(true).deadline(DEADLINE).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings).deadlines(true).seed(seed).build(shape()).unwrap();
    let run = cluster.run_machines(async |machine: Machine| {
        if machine.rank() == B {
            speak(&machine, tokens, rows).await.unwrap();
            return None;
        }
        let mut ep = Engine::new(machine).unwrap();
        let got = dispatch(&mut ep, (1, 1, LowKind::PerChoice)).await;
        got.err().map(|error| error.failure().expect("a failure").fault)
    });
    run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished()[A.index()]
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let all: Vec<u32> = (0..MAX).collect();
    let (least, beyond, many) = ("least token of the next row", "tokens of a source", "rows of a source");
    let cases: [(&[u32], u32, _); 6] = [
        (&all, MAX, None),
        (&[0, 0], 2, Some((least, 1, 0))),
        (&[1, 3, 2], 3, Some((least, 4, 2))),
        (&[MAX], 1, Some((beyond, MAX, MAX))),
        // Its rows would be looked for where those of the next rank lie.
        (&all, MAX + 1, Some((many, MAX, MAX + 1))),
        (&all, 2 * MAX, Some((many, MAX, 2 * MAX))),
    ];
    for (seed, (tokens, rows, due)) in (0..SEEDS).flat_map(|seed| cases.map(|case| (seed, case))) {
        let mismatch = |(field, mine, theirs): (_, u32, u32)| Fault::Mismatch {
            field,
            mine: mine.into(),
            theirs: theirs.into(),
            peer: B,
        };
        assert_eq!(told(seed, tokens, rows), due.map(mismatch), "seed {seed}: {rows} rows, tokens {tokens:?}");
    }
}
