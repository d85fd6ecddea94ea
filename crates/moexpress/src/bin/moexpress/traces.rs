//! Trace files for Perfetto.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use ep_core::trace::{Record, perfetto};

use crate::failure::Failure;

/// Creates the file of `--trace`, before a run whose trace would be lost.
pub(crate) fn create(path: &Path) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::bad_input(format_args!("cannot create {}: {error}", path.display())))
}

/// Writes `records` as a Chrome trace.
pub(crate) fn write(file: File, path: &Path, records: &[Record]) -> Result<(), Failure> {
    let mut text = Text { out: BufWriter::new(file), outcome: Ok(()) };
    // The formatting error says nothing; its reason lies in `outcome`.
    let _ = perfetto(records, &mut text);
    let written = text.outcome.and_then(|()| text.out.flush());
    written.map_err(|error| Failure::failed(format_args!("cannot write {}: {error}", path.display())))
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
