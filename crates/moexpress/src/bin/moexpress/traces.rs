//! Trace files for Perfetto.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};

use ep_core::trace::{Record, perfetto};

use crate::failure::Failure;
use crate::whole::Whole;

/// Writes `records` as a Chrome trace.
pub(crate) fn write(file: Whole, records: &[Record]) -> Result<(), Failure> {
    file.write_with(|file| write_to(file, records))
}

fn write_to(file: &mut File, records: &[Record]) -> io::Result<()> {
    let mut text = Text { out: BufWriter::new(file), outcome: Ok(()) };
    // The formatting error says nothing; its reason lies in `outcome`.
    let _ = perfetto(records, &mut text);
    text.outcome.and_then(|()| text.out.flush())
}

/// A file that text is formatted into; remembers the first error.
struct Text<W> {
    out: W,
    outcome: io::Result<()>,
}

impl<W: Write> fmt::Write for Text<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.out.write_all(text.as_bytes()).map_err(|error| {
            self.outcome = Err(error);
            fmt::Error
        })
    }
}
