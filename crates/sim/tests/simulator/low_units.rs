//! Low latency as units beyond what the suite sees: tags after billions of operations, and a machine that tears units.

use crate::common::{DEADLINE, SEEDS};
use crate::endpoints::drop_after;
use ep_core::engine::Engine;
use ep_core::engine::low_latency::LowRouting;
use ep_core::machine::{Machine as _, Window as _};
use ep_core::plant::Plant;
use ep_core::port::{Tag, unit_bytes};
use ep_core::{Endpoint, Error, Failure, LowLatency, Rank, RankSet, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Machine};

const RANKS: u32 = 3;
const TOKENS: u32 = 3;
/// Bytes of a row.
const BYTES: usize = 1536;

fn shape() -> Shape {
    Shape::builder().experts(RANKS).topk(RANKS).hidden(BYTES as u32 / 2).max_tokens(TOKENS).build().unwrap()
}

/// A cluster after so many operations.
fn cluster(before: u64) -> Builder {
    let topology = Topology::new(1, RANKS).unwrap();
    let settings = Settings::builder(&shape(), &topology).low_latency(true).low_latency_units(true).deadline(DEADLINE);
    Cluster::builder(topology).settings(settings.build().unwrap().with_operations_before(before)).deadlines(true)
}

/// Dispatches rows that hold `fill`, each to all ranks. Whether all that came is right.
async fn dispatch(ep: &mut Engine<Machine>, fill: u8) -> Result<bool, Error> {
    let x = ep.rows(&[fill; TOKENS as usize * BYTES], TOKENS)?;
    let topk_idx = (0..TOKENS).flat_map(|_| 0..i64::from(RANKS)).collect();
    let got = ep.low_latency_dispatch(&x, &LowRouting::new(topk_idx, None)).await?;
    let rows = RANKS * TOKENS;
    Ok(got.expert_counts == [rows as i32]
        && ep.bytes(&got.x)?[..rows as usize * BYTES].iter().all(|&byte| byte == fill))
}

/// Units that are not zero in this rank's memory for those of all others, in the bank of `op`.
fn filled(ep: &Engine<Machine>, op: u64) -> usize {
    let (machine, unit) = (ep.machine(), unit_bytes(1) as usize);
    let of_writer = |writer| {
        let part = machine.layout().low_unit_part(op, writer);
        let mut bytes = vec![1; part.len as usize];
        machine.window().read(part.offset, &mut bytes).unwrap();
        bytes.chunks(unit).filter(|unit| unit.iter().any(|&byte| byte != 0)).count()
    };
    (0..RANKS).map(Rank).filter(|&writer| writer != ep.rank()).map(of_writer).sum()
}

fn is_cleared(ep: &Engine<Machine>, op: u64) -> bool {
    filled(ep, op) == 0
}

/// The first operation of each bank in a stretch of tags leaves cleared memory, and the ones that follow are as before. The other bank, where
/// what was put before lies, is left as it is.
#[test]
fn memory_for_units_is_cleared_once_in_each_stretch_of_tags() {
    let last = (1..).find(|&power| Tag::era(1 << power) == 1).map(|power| (1u64 << power) - 1).unwrap();
    assert_eq!((Tag::era(last), Tag::era(last + 1)), (0, 1));
    // To look at units without polling them is a race; so it is looked for in other runs.
    let runs = (0..SEEDS).flat_map(|seed| [3, 4].map(|first| [(seed, first, false), (seed, first, true)])).flatten();
    // `first` is the first operation of the stretch, and the next one the first of the other bank.
    for (seed, first, looks) in runs {
        let cluster = cluster(last + 1 - first).race_tracking(!looks).seed(seed).build(shape()).unwrap();
        let run = cluster.run(async |mut ep| {
            let (mut cleared, mut full) = (Vec::new(), 0);
            for op in 1..=6 {
                assert!(dispatch(&mut ep, op as u8).await.unwrap(), "operation {op}");
                cleared.extend(looks.then(|| is_cleared(&ep, op)));
                if looks && op == first - 1 {
                    full = filled(&ep, op);
                } else if looks && op == first {
                    assert_eq!(filled(&ep, op + 1), full, "units of the bank that is not cleared");
                }
            }
            cleared
        });
        let cleared = run.unwrap_or_else(|violation| panic!("{violation}")).finished();
        let right = (1..=6).filter(|_| looks).map(|op| op == first || op == first + 1).collect::<Vec<_>>();
        assert!(cleared.iter().all(|cleared| *cleared == right), "{cleared:?}");
    }
}

/// A stretch that begins with a generation is cleared by the third and fourth operation, and once; one that was cleared before is not again.
#[test]
fn the_first_operations_of_a_generation_leave_memory_as_it_is() {
    let last = (1..).find(|&power| Tag::era(1 << power) == 1).map(|power| (1u64 << power) - 1).unwrap();
    let run = cluster(last - 1).race_tracking(false).build(shape()).unwrap().run(async |mut ep| {
        let mut cleared = Vec::new();
        for (generation, ops) in (0..).zip([1, 2, 6, 6]) {
            for op in 1..=ops {
                assert!(dispatch(&mut ep, 8 * generation + op as u8).await.unwrap(), "operation {op}");
                cleared.push(is_cleared(&ep, op));
            }
            ep.rejoin().await.unwrap();
        }
        cleared
    });
    let cleared = run.unwrap_or_else(|violation| panic!("{violation}")).finished();
    // The second generation is the first of the stretch.
    let right = [&[false; 3][..], &[false, false, true, true, false, false], &[false; 6]].concat();
    assert!(cleared.iter().all(|cleared| *cleared == right), "{cleared:?}");
}

/// Tags wrap around; nobody notices.
#[test]
fn tags_wrap_around() {
    for seed in 0..SEEDS {
        let run = cluster(u64::from(u32::MAX) - 2).seed(seed).build(shape()).unwrap().run(async |mut ep| {
            for op in 1..=5 {
                assert!(dispatch(&mut ep, op).await.unwrap(), "operation {op}");
            }
        });
        run.unwrap_or_else(|violation| panic!("{violation}"));
    }
}

/// Where units come in halves, rows are wrong, or refused for what their headers seem to say.
#[test]
fn rows_whose_units_are_torn_are_wrong() {
    assert!(unit_bytes(BYTES as u64) > BYTES as u64);
    let torn = |torn: bool| {
        let wrong = |seed: &u64| {
            let run = cluster(0).torn_units(torn).seed(*seed).build(shape()).unwrap().run(async |mut ep| {
                for op in 1..=4 {
                    match dispatch(&mut ep, op).await {
                        Ok(true) => {}
                        Ok(false) => return true,
                        Err(Error::Failed(Failure { .. })) => return true,
                        Err(other) => panic!("{other}"),
                    }
                }
                false
            });
            run.map_or(true, |run| run.finished().contains(&true))
        };
        (0..SEEDS).filter(wrong).count()
    };
    assert_eq!(torn(false), 0);
    assert!(torn(true) > 0);
}

/// A sending half that is dropped half-way counts as no operation, and has put units nevertheless: their tags are used up. (The
/// third operation of a generation has the bank of the first one of the next.)
#[test]
fn tags_of_a_half_that_was_dropped_are_not_used_again() {
    for seed in 0..SEEDS {
        let run = cluster(0).seed(seed).build(shape()).unwrap().run(async |mut ep| {
            for fill in 1..=2 {
                // The other rank may be done and recover already: what it had under way to this one is then lost.
                let _ = dispatch(&mut ep, fill).await;
            }
            let _ = drop_after(1 + (seed % 30) as u32, dispatch(&mut ep, 3)).await;
            // The other may still wait for what this one has dropped.
            let mut recovered = ep.recover(&RankSet::new()).await;
            for _ in 0..3 {
                if recovered.is_err() {
                    recovered = ep.recover(&RankSet::new()).await;
                }
            }
            recovered.unwrap();
            assert!(dispatch(&mut ep, 4).await.unwrap());
        });
        run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
    }
}

/// What a generation has left never passes for what is new: tags run on. Where they start again, units come that lie there already.
#[test]
fn tags_run_on_through_generations() {
    let is_wrong = |seed: u64, plant: Option<Plant>| {
        let topology = Topology::new(1, RANKS).unwrap();
        let settings = Settings::builder(&shape(), &topology).low_latency(true).low_latency_units(true);
        let settings = settings.deadline(DEADLINE).build().unwrap();
        let settings = plant.map_or(settings, |plant| settings.with_plant(plant));
        let run =
            Cluster::builder(topology).settings(settings).seed(seed).build(shape()).unwrap().run(async |mut ep| {
                for fill in 1..=6 {
                    if fill == 4 {
                        ep.rejoin().await.unwrap();
                    }
                    if !matches!(dispatch(&mut ep, fill).await, Ok(true)) {
                        return true;
                    }
                }
                false
            });
        run.map_or(true, |run| run.finished().contains(&true))
    };
    assert!((0..SEEDS).all(|seed| !is_wrong(seed, None)));
    assert!((0..SEEDS).any(|seed| is_wrong(seed, Some(Plant::TagsStartAgain))));
}
