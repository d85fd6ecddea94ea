//! What a simulated cluster takes of memory besides the rows that it moves.
//!
//! Windows are sparse, so what counts is how many roles there are and what each of them is known by. The factors were
//! measured on 16 to 512 ranks with one token each; the tests of the command line (`tests/cli/memory.rs` of `moexpress`) hold
//! them against what is taken.

use ep_core::Layout;
use ep_core::memory::Estimate;

/// Bytes of a pair of ranks under the timed scheduler: roles, ports, lanes and cells.
const TIMED_PAIR: f64 = 7500.0;
/// The same in low latency, which has a few roles a rank.
const TIMED_LOW_PAIR: f64 = 600.0;
/// Copies of a counts message that stand behind a pair of ranks.
const COUNTS: f64 = 1.8;
/// Bytes of the adversary's clocks for each pair of roles, one role for each pair of ranks.
const CLOCKS: f64 = 280.0;
/// The same in low latency.
const LOW_CLOCKS: f64 = 5.0;
/// Bytes of a ticket.
const TICKET: u64 = 16;

/// What ranks take under a scheduler, in the mode that their settings leave room for.
pub(crate) fn of(layout: &Layout, timed: bool) -> Estimate {
    let (rings, low) = (layout.settings().rings(), layout.settings().low_latency());
    let ranks = f64::from(layout.topology().ranks());
    let pairs = ranks * ranks;
    let channels = 0.4 + 0.6 * f64::from(rings.channels);
    let bookkeeping = match (timed, low) {
        (true, true) => pairs * TIMED_LOW_PAIR,
        (true, false) => pairs * (TIMED_PAIR * channels + COUNTS * layout.counts_bytes() as f64),
        (false, true) => pairs * pairs * LOW_CLOCKS,
        (false, false) => pairs * pairs * CLOCKS * channels * channels,
    };
    let staging = u64::from(rings.channels) * u64::from(rings.near.staging_slots()) * TICKET;
    let peers = (pairs as u64).saturating_mul(if low { 0 } else { staging });
    let directories = (ranks as u64).saturating_mul(layout.window_bytes().div_ceil(32 << 20)).saturating_mul(24);
    let clocks = if timed { "roles and cells of the simulator" } else { "roles and clocks of the simulator" };
    Estimate::default().with(clocks, bookkeeping as u64).with("staging of rings", peers).with("pages", directories)
}
