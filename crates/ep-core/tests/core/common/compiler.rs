//! The C++ compiler that tests use.

use std::env;
use std::process::Command;

/// The first C++ compiler that runs: `$CXX`, or what systems usually have. None, with a word, where there is none and that is allowed.
pub(crate) fn compiler() -> Option<String> {
    let named = env::var("CXX").ok();
    let usual = ["g++", "clang++", "c++"].map(String::from);
    let found = named.into_iter().chain(usual).find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        assert!(env::var_os("CI").is_none(), "no C++ compiler: install g++ or clang++, or set CXX");
        eprintln!("NOT RUN: a C++ compiler is needed (g++, clang++ or $CXX)");
    }
    found
}
