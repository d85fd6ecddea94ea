//! The page with figures, which several commands write.

use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;
use crate::whole::Whole;

#[derive(Args, Debug)]
pub(crate) struct HtmlArgs {
    /// Writes a page with figures: one file that any browser shows
    #[arg(long = "html", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

impl HtmlArgs {
    /// The page, if one is asked for: it can be written, or that is refused before anything runs.
    pub(crate) fn create(&self) -> Result<Option<Whole>, Failure> {
        self.file.as_deref().map(Whole::create).transpose()
    }
}
