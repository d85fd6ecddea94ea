//! The C++ compiler that tests use.

use std::env;
use std::process::Command;

/// The first C++ compiler that runs: `$CXX`, or what systems usually have. None where `EP_WITHOUT_CXX` leaves out what needs one.
pub(crate) fn compiler() -> Option<String> {
    let named = env::var("CXX").ok();
    let usual = ["g++", "clang++", "c++"].map(String::from);
    let found = named.into_iter().chain(usual).find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        let left_out = env::var_os("EP_WITHOUT_CXX").is_some();
        assert!(
            left_out,
            "no C++ compiler: install g++ or clang++, set CXX, or leave out what needs one by EP_WITHOUT_CXX=1"
        );
    }
    found
}
