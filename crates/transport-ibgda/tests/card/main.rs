//! The whole transport on a card made of software (`soft-hca`): what the host tells it, and what kernels' verbs write and read, under every order that
//! a real card may choose.

#[path = "../common/mod.rs"]
mod common;
mod failures;
mod life;
mod mutations;
mod rank;
mod rings;

use ep_ibgda::{Doorbell, Settings, Signal};

use rank::Verbs;
use rings::{Scenario, run};

/// Scenarios of a run of this test; `EP_IBGDA_SCENARIOS` says more.
fn scenarios() -> u64 {
    std::env::var("EP_IBGDA_SCENARIOS").map_or(30, |count| count.parse().expect("EP_IBGDA_SCENARIOS is a number"))
}

#[test]
fn rows_arrive_before_they_are_announced_whatever_order_the_card_chooses() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    for seed in 0..scenarios() {
        let scenario = Scenario::of(seed);
        run(&verbs, &scenario).unwrap_or_else(|wrong| panic!("{wrong}\n{scenario:?}"));
    }
}

/// The same where a publish is a write, the value inside its element.
#[test]
fn a_publish_that_is_a_write_comes_after_its_rows() {
    let settings = Settings::new().signal(Signal::OrderedWrite);
    let Some(verbs) = Verbs::new(&settings, None) else { return };
    for seed in 0..scenarios() / 2 {
        let scenario = Scenario::of(2_000_000 + seed);
        run(&verbs, &scenario).unwrap_or_else(|wrong| panic!("{wrong}\n{scenario:?}"));
    }
}

/// The same with bells rung twice, batches of three elements and messages of 48 bytes: a row takes several, which may need more room than there is.
#[test]
fn batches_long_messages_and_double_bells_change_nothing() {
    let settings =
        Settings::new().doorbell(Doorbell::Double).batch(3).and_then(|settings| settings.longest_message(48));
    let settings = settings.expect("settings");
    let Some(verbs) = Verbs::new(&settings, None) else { return };
    for seed in 0..scenarios() / 2 {
        let scenario = Scenario::of(1_000_000 + seed);
        run(&verbs, &scenario).unwrap_or_else(|wrong| panic!("{wrong}\n{scenario:?}"));
    }
}
