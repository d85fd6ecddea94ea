//! The measurement of calls over nodes: its ranks meet, and what comes back is compared.

use std::time::Duration;

use ep_core::{Element, Placement};
use ep_cuda::bench::{Choice, NodesCut, Plan, run_nodes, run_puts};
use ep_loop::Loop;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trial(absent: Option<&'static str>) -> Trial {
    let name = "timed::calls_over_nodes_are_timed_and_what_comes_back_is_compared";
    Trial::test(name, measures).with_ignored_flag(absent.is_some())
}

/// Two nodes of one rank and of two, rows placed and not, and low latency.
fn measures() -> Result<(), Failed> {
    for (ranks, placement, low_latency) in
        [(2, Placement::Ring, false), (4, Placement::Direct, false), (2, Placement::Ring, true)]
    {
        let (tokens, hidden, topk, experts) = (20, 256, 2, 8);
        let (element, choice, repetitions) = (Element::Bf16, Choice::Any, 2);
        let plan = Plan { ranks, tokens, hidden, topk, experts, element, choice, repetitions };
        let cut = NodesCut { nodes: 2, low_latency, blocks: 2, placement, channels: Some(2), slots: None };
        let network = Loop::new().bytes_per_second(1_000_000_000)?;
        let times = run_nodes(&plan, &cut, |builder| Ok(builder.far(network)))?;
        let row = 2 * u64::from(hidden);
        assert_eq!(times.far_bytes[0], times.far_bytes[1]);
        assert!(times.far_bytes[0].is_multiple_of(row) && times.far_bytes[0] <= u64::from(tokens) * row);
        // At a gigabyte a second a byte takes a nanosecond.
        let least = times.far_bytes[0] as f64 / 1e3;
        assert!(times.wrong == 0 && times.dispatch > least && times.combine > least, "{times:?}, {least} us");
    }
    let late = Loop::new().latency(Duration::from_millis(2))?;
    let times = run_puts(7168, |builder| Ok(builder.far(late)))?;
    assert!(times.one_way >= 2000.0 && times.posted < times.one_way, "{times:?}");
    Ok(())
}
