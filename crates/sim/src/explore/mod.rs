//! The explore scheduler: every order that the machine contract allows may happen, drawn from a seed.
//!
//! [`World`] holds the state of a run and what may happen next, the [`adversary`] draws which of it does, [`lane`] has what
//! is in flight, and [`race`] says which accesses nothing orders.

mod adversary;
mod lane;
mod race;
mod world;

pub(crate) use world::{Config, Port, Step, Wakes, World};
