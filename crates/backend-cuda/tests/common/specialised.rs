//! Cases of the suite whose kernels are compiled for their shape alone: each compiles for seconds, so they are few.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_conformance::harness;
use ep_core::Nanos;
use libtest_mimic::Trial;

use crate::common::Cuda;

/// The one that has fewest kernels to compile.
pub const SHORT: &str = "engine_bias_and_weights";

/// Some for each kernel that is specialised, on one node and on two.
const CASES: [&str; 3] = [SHORT, "low_latency_both_forms", "nodes_two_of_two"];

/// Time allowed to operations, on busy processors too.
const DEADLINE: Nanos = Nanos::from_secs(10);

pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let trial = |case: &'static str| {
        let run = move || {
            let backend = Cuda { specialised: true, deadline: Some(DEADLINE), ..Cuda::new() };
            harness::run_case(case, backend).map_err(Into::into)
        };
        Trial::test(format!("specialised::{case}"), run).with_ignored_flag(absent.is_some())
    };
    CASES.map(trial).into()
}
