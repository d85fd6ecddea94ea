//! The page of `moexpress compare`: simulated beside published.

use serde_json::Value;

use super::bars::{Bar, Bars};
use super::{Page, legend, text};

/// The page of the object of `--json`.
pub(crate) fn page(report: &Value) -> String {
    let lead = format!(
        "DeepEP V1 as published for H800s, and the timed scheduler on the model {}: means of the ranks. Nothing here was measured on \
         such machines.",
        text(&report["model"])
    );
    let mut page = Page::new("The model beside published figures", None, lead);
    for table in report["tables"].as_array().into_iter().flatten() {
        let unit = text(&table["unit"]);
        let mut bars = Bars::default();
        for row in table["rows"].as_array().into_iter().flatten() {
            bars.group(
                heading(row),
                [("there", "dispatch"), ("back", "combine")].map(|(class, operation)| {
                    let [simulated, published, error] = ["simulated", "published", "error_percent"]
                        .map(|key| row[operation][key].as_f64().unwrap_or(0.0));
                    Bar {
                        name: operation.to_owned(),
                        parts: vec![(class, simulated)],
                        ceiling: Some(published),
                        value: format!("{simulated:.0} {unit}, {error:+.0} %"),
                    }
                }),
            );
        }
        let colours =
            legend(&[("there", "dispatch, simulated"), ("back", "combine, simulated"), ("mark", "published")]);
        page.section(text(&table["part"]), text(&table["what"]), colours + &bars.html());
    }
    page.finish(report)
}

fn heading(row: &Value) -> String {
    let network = if row["nvlink"] == false { ", all over the network" } else { "" };
    let calibrated = if row["calibrated_on"] == true { ", to which the model was fitted" } else { "" };
    format!("{} ranks{network}{calibrated}", row["ranks"])
}
