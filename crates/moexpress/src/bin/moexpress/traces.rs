//! Trace files for Perfetto.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use ep_core::trace::{Record, Verb};

use crate::failure::Failure;

/// Creates the file of `--trace`, before a run whose trace would be lost.
pub(crate) fn create(path: &Path) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::bad_input(format_args!("cannot create {}: {error}", path.display())))
}

/// Writes records as Chrome trace events: a process for each rank, a thread for each role.
pub(crate) fn write(file: File, path: &Path, records: &[Record]) -> Result<(), Failure> {
    let mut out = BufWriter::new(file);
    let written = write_events(&mut out, records).and_then(|()| out.flush());
    written.map_err(|error| Failure::failed(format_args!("cannot write {}: {error}", path.display())))
}

fn write_events(out: &mut impl Write, records: &[Record]) -> std::io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut comma = "";
    for record in records {
        let (phase, name) = match record.verb {
            Verb::Open => ("B", record.role.duty.name()),
            Verb::Close => ("E", record.role.duty.name()),
            Verb::Wait { .. } => ("B", "wait"),
            Verb::Woke { .. } => ("E", "wait"),
            Verb::Put { .. } => ("i", "put"),
            Verb::Get { .. } => ("i", "get"),
            Verb::Publish { .. } => ("i", "publish"),
            Verb::Flushed { .. } => ("i", "flushed"),
        };
        let event = serde_json::json!({
            "ph": phase,
            "name": name,
            "ts": record.at.0 as f64 / 1e3,
            "pid": record.rank.0,
            "tid": record.role.to_string(),
            "args": { "op": record.op, "verb": format!("{:?}", record.verb) },
        });
        write!(out, "{comma}\n{event}")?;
        comma = ",";
    }
    out.write_all(b"\n]}\n")
}
