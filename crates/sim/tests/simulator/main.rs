//! The simulator itself: its schedulers keep the contract, find what breaks it, and replay.

mod common;
mod coordinators;
mod counting;
mod endpoints;
mod engine_allocation;
mod faults;
mod lanes;
mod low;
mod low_announced;
mod low_false;
mod low_forms;
mod low_units;
mod no_allocation;
mod outbox_false;
mod promises;
mod races;
mod recovery;
mod relays;
mod replay;
mod rules;

mod timed;
mod timed_engine;
mod timed_partitions;
mod units;
