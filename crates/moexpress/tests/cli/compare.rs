//! `moexpress compare`.

use crate::moexpress;

#[test]
fn low_latency_comes_near_what_deepep_publishes() {
    let object = moexpress("compare deepep --only low-latency --up-to 32 --json").json();
    let rows = object["tables"][0]["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|row| row["ranks"].as_u64().unwrap()).collect::<Vec<_>>(), [8, 16, 32]);
    for row in rows {
        assert_eq!(row["calibrated_on"], row["ranks"] == 8);
        for operation in ["dispatch", "combine"] {
            let error = row[operation]["error_percent"].as_f64().unwrap();
            assert!(error.abs() < 7.0, "{operation} of {row}");
        }
    }
    let dispatch = &rows[1]["dispatch"];
    let wanted = 100.0 * (dispatch["simulated"].as_f64().unwrap() / dispatch["published"].as_f64().unwrap() - 1.0);
    assert!((dispatch["error_percent"].as_f64().unwrap() - wanted).abs() < 1e-9);
}

#[test]
fn the_text_states_every_parameter_and_what_was_fitted() {
    let text = moexpress("compare deepep --only low-latency --up-to 8").success();
    for part in
        ["model h800-cx7: near rate 160 GB/s", "far latency 3.0 us", "the only value that was fitted", "8*", "launch"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("normal:"), "{text}");
}

#[test]
fn unknown_figures_are_refused() {
    assert!(moexpress("compare nccl").refusal().contains("possible values: deepep"));
    assert!(moexpress("compare deepep --up-to 4").refusal().contains("4 is not in 8.."));
}
