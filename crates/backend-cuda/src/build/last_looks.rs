//! Whoever was given up may have pulled what was written anew. So kernels that pull look once more, when all their blocks have pulled and before anybody is
//! told that the operation is over.

use super::{ALL, Source};

#[test]
fn kernels_that_pull_look_again_when_all_has_been_pulled() {
    let pulls = [Source::Combine, Source::CombinePulled, Source::DispatchPulled];
    for source in ALL {
        let text = source.text();
        let looks = text.find("ep_last_block_has_pulled(r, EP_MEETING_MOVED)");
        assert_eq!(looks.is_some(), pulls.contains(&source), "{}", source.name());
        let ends = ["ep_say_done(r)", "ep_end_combine(r, a, began)"].map(|end| text.rfind(end));
        let said = ends.into_iter().flatten().max();
        assert!(looks.is_none_or(|looks| said.is_some_and(|said| looks < said)), "{}", source.name());
    }
}
