//! Rows in an outbox that no rank lays, and that are refused all the same: here a peer that is played by hand lays them.

use crate::common::{A, B, DEADLINE};
use ep_core::engine::{Engine, Routing};
use ep_core::layout::{Kind, NO_BASE, OPEN_ROOM};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Offset, Port as _, Role};
use ep_core::{Endpoint as _, Fault, Placement, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine, Port};

const SEEDS: u64 = 20;
const CONTROL: LaneKind = LaneKind::Control;

/// Positions that a token has at rank 0, and what is refused of them: the position that is due, and the one that is there.
type Case = (&'static [i32], Option<(u64, u64)>);

fn shape() -> Shape {
    Shape::builder().experts(2).topk(1).hidden(32).max_tokens(4).build().unwrap()
}

fn write(port: &mut Port, to: Offset, words: &[u32]) {
    port.write(to, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
}

const fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

async fn tell(port: &mut Port, kind: LaneKind, counter: Counter, value: u64) {
    port.publish(LaneId { peer: A, kind }, Cell::new(B, kind, counter), value).await.unwrap();
}

/// Puts these words, that are to lie at `from`, to `to`, and says so.
async fn send(port: &mut Port, from: Offset, words: &[u32], to: Offset, counter: Counter) {
    write(port, from, words);
    port.put(LaneId { peer: A, kind: CONTROL }, from.span(4 * words.len() as u64), to).await.unwrap();
    tell(port, CONTROL, counter, 1).await;
}

/// Rank 1 says that a row of each of its tokens is for rank 0, and lays them: each at such a position.
async fn lay(machine: &Machine, positions: &[i32]) {
    let opening = Opening { role: Role::new(Duty::Control), op: 1, generation: 1, deadline: DEADLINE };
    let (layout, mut port) = (machine.layout(), machine.port(opening));
    let (rings, tokens) = (layout.settings().rings(), positions.len() as u32);
    let [low, high] = halves(layout.hash(&rings));
    // Operation, kind, rows, settings and first row.
    let opening = [1, 0, Kind::Dispatch as u32, 0, low, high, 0, 0];
    // Rows to each rank, and tokens for each expert.
    let counts = [&opening[..], &[tokens, OPEN_ROOM, 0, 0], &[tokens, 0], &[tokens, 0]].concat();
    let at = layout.counts(1, B).offset;
    send(&mut port, at, &counts, at, Counter::Counts).await;
    let note = [&opening[..], &halves(NO_BASE)].concat();
    send(&mut port, layout.note_outbox(A).offset, &note, layout.note(1, B).offset, Counter::Note).await;
    let outbox = layout.outbox(&rings, 0);
    for (token, &position) in (0..).zip(positions) {
        let head = outbox.head(token).offset;
        // Source, its token, nothing, and the operation; then the row's position at each rank.
        write(&mut port, head, &[B.0, token, 0, 1]);
        write(&mut port, head.plus(layout.position_in_head(0)), &[position as u32, u32::MAX]);
    }
    tell(&mut port, LaneKind::Data(0), Counter::Tail, tokens.into()).await;
}

#[test]
fn positions_that_cannot_be_are_refused() {
    let cases: [Case; 5] = [
        (&[0, 1], None),
        (&[0, 0], Some((1, 0))),
        (&[0, 2, 1], Some((1, 2))),
        // In order, and beyond the rows that rank 1 has said: there lie those of the next rank.
        (&[1], Some((1, 1))),
        (&[1, 2], Some((2, 2))),
    ];
    let topology = Topology::new(1, 2).unwrap();
    let settings = Settings::builder(&shape(), &topology).placement(Placement::Pulled).channels(1).deadline(DEADLINE);
    let cluster = Cluster::builder(topology).settings(settings.build().unwrap()).deadlines(true);
    for ((positions, due), seed) in cases.into_iter().flat_map(|case| (0..SEEDS).map(move |seed| (case, seed))) {
        let run = cluster.clone().seed(seed).build(shape()).unwrap().run_machines(async |machine: Machine| {
            if machine.rank() == B {
                lay(&machine, positions).await;
                return None;
            }
            let mut ep = Engine::new(machine).unwrap();
            let x = ep.rows(&[], 0).unwrap();
            let routing = Routing::TopK { topk_idx: Vec::new(), topk_weights: None };
            let got = ep.dispatch(&x, &routing).await;
            got.err().map(|error| error.failure().expect("a failure").fault)
        });
        let run = run.unwrap_or_else(|violation| panic!("{positions:?}, seed {seed}: {violation}"));
        let refused = |(mine, theirs)| Fault::Mismatch { field: "position of a row", mine, theirs, peer: B };
        assert_eq!(run.finished()[A.index()], due.map(refused), "{positions:?}, seed {seed}");
    }
}
