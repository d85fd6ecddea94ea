//! What a benchmark has measured: lines for people, and an object a row for programs.

use std::fmt::Write;

use ep_core::Element;
use ep_core::quant::Scaling;
use serde_json::Value;

use crate::args::{BenchArgs, name_of};
use crate::failure::Failure;
use crate::page;
use crate::whole::Whole;

/// How rows travel in the benchmarks, by name.
pub(super) const ELEMENTS: [(&str, Element); 2] = [("bf16", Element::Bf16), ("fp8", Element::Fp8(Scaling::Exact))];

#[derive(Debug, Default)]
pub(super) struct Table {
    text: String,
    rows: Vec<Value>,
}

impl Table {
    pub(super) fn line(&mut self, line: impl std::fmt::Display) {
        writeln!(self.text, "{line}").expect("writing to a string does not fail");
    }

    pub(super) fn row(&mut self, row: Value) {
        self.rows.push(row);
    }

    /// As `args` asks for it; the page, too.
    pub(super) fn print(self, args: &BenchArgs, html: Option<Whole>) -> Result<String, Failure> {
        let rows = Value::Array(self.rows);
        if let Some(file) = html {
            file.write(page::bench(&name_of(args.backend), &rows).as_bytes())?;
        }
        Ok(if args.json { format!("{rows}\n") } else { self.text })
    }
}
