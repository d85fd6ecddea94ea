//! Numbers as people read them, and how far the work is.

use std::io;
use std::thread;
use std::time::Duration;

use ep_core::memory::Size;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, write};

/// `1234567` as `1,234,567`.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes with a binary unit.
pub(crate) fn bytes(value: u64) -> String {
    Size(value).to_string()
}

/// The most bytes of memory that this process has had so far, where the system tells.
pub(crate) fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    peak.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// `1 rank`, `8 ranks`.
pub(crate) fn plural(value: u64, what: &str) -> String {
    let s = if value == 1 { "" } else { "s" };
    format!("{} {what}{s}", count(value))
}

/// How long a full stderr may take to have room again.
const PATIENCE: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
/// A pipe that can be written to has room for as much.
const PART: usize = 4096;

/// Says something on stderr. Where that is full, and nobody reads it, it stays unsaid: whoever is stuck there keeps nobody else,
/// nor does a thread that waits for the same reader with the stream locked.
pub(crate) fn complain(text: &str) {
    let (stderr, line) = (io::stderr(), format!("{text}\n"));
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        let written = match poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&PATIENCE)) {
            Ok(0) => return,
            Ok(_) => write(&stderr, &rest[..rest.len().min(PART)]),
            Err(error) => Err(error),
        };
        match written {
            Ok(written) => rest = &rest[written..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Nothing is left to tell when stderr is gone, too.
            Err(_) => return,
        }
    }
}

/// How often a bar is drawn anew while nothing gets on.
const TICK: Duration = Duration::from_millis(200);

/// A bar on stderr where that is a terminal.
pub(crate) fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg:<12} {wide_bar} {percent:>3} % {elapsed}");
    let bar = ProgressBar::new(1);
    if let Ok(style) = style {
        bar.set_style(style);
    }
    if !bar.is_hidden() {
        tick(&bar);
    }
    bar
}

/// Draws a bar anew until it is finished. The bar's own ticker panics where no thread can be started: here the bar then moves
/// with the steps alone.
fn tick(bar: &ProgressBar) {
    let bar = bar.downgrade();
    let ticks = move || {
        while let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) {
            bar.tick();
            thread::sleep(TICK);
        }
    };
    let _ = thread::Builder::new().name("progress".to_owned()).spawn(ticks);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_scaled() {
        assert_eq!((count(0), count(999), count(1_234_567)), ("0".into(), "999".into(), "1,234,567".into()));
        assert_eq!((bytes(1023), bytes(1536), bytes(3 << 30)), ("1023 B".into(), "1.5 KiB".into(), "3.0 GiB".into()));
        assert_eq!((plural(1, "rank"), plural(1000, "rank")), ("1 rank".into(), "1,000 ranks".into()));
    }
}
