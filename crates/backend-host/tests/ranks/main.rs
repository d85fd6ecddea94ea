//! Ranks of one host: what dies, what lies elsewhere, what is left in results, and what verbs allocate.

#[path = "../../../sim/tests/simulator/counting.rs"]
mod counting;
mod death;
#[path = "../common/double.rs"]
mod double;
mod gone;
mod no_allocation;
mod nodes;
mod results;
