use super::*;
use crate::shape::Shape;

#[test]
fn what_is_given_back_is_one_piece_again() {
    let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
    let arena = Arena::new(Offset(SLOT_ALIGN).span(10 * format.block_bytes(1)));
    let blocks: Vec<_> = (0..10).map(|_| arena.take(&format, 1).unwrap()).collect();
    assert!(arena.take(&format, 1).is_none());
    for at in [3, 5, 4, 0, 9, 1, 2, 8, 6, 7] {
        arena.give(&blocks[at]);
    }
    assert_eq!(arena.free().ranges.len(), 1);
    assert!(arena.take(&format, 0).is_some());
}

/// Of 128 bytes, as a GPU's cache has them: rows beside one are dispatched and combined more slowly.
#[test]
fn blocks_of_any_number_of_rows_begin_at_a_line() {
    for (hidden, topk) in [(7168, 8), (17, 3), (1, 1)] {
        let format = RowFormat::new(&Shape::builder().hidden(hidden).topk(topk).build().unwrap());
        let arena = Arena::new(Offset(1).span(64 << 20));
        for rows in 1..40 {
            let block = arena.take(&format, rows).unwrap();
            assert!(block.base().0.is_multiple_of(128), "{rows} rows of {hidden} elements: {:?}", block.base());
        }
    }
}

#[test]
fn what_is_cut_off_is_another_s() {
    let format = RowFormat::new(&Shape::builder().hidden(1024).topk(3).build().unwrap());
    let whole = Offset(SLOT_ALIGN).span(format.block_bytes(10));
    let arena = Arena::new(whole);
    for rows in [0, 1, 4, 10] {
        let block = arena.cut(&arena.take(&format, 10).unwrap(), rows);
        assert_eq!(block.rows(), rows);
        let other = arena.take(&format, 9 - rows.min(9)).unwrap();
        assert!(rows == 10 || other.span().len == 0 || other.span().offset.0 >= block.span().end());
        [block, other].iter().for_each(|block| arena.give(block));
        assert_eq!(arena.free().ranges, [whole], "{rows} rows");
    }
}

#[test]
fn what_is_said_to_have_room_has_it() {
    let format = RowFormat::new(&Shape::builder().hidden(40).topk(3).build().unwrap());
    let both = |rows| format.block_bytes(rows) + format.results().block_bytes(rows);
    for bytes in [0, 100, both(1) - 1, both(1), both(7) - SLOT_ALIGN, both(7), both(8) - SLOT_ALIGN] {
        let arena = Arena::new(Offset(128).span(bytes));
        let room = arena.room(&format);
        assert!(arena.take(&format, room).is_some() && arena.take(&format.results(), room).is_some(), "{bytes}");
        let arena = Arena::new(Offset(128).span(bytes));
        let more = arena.take(&format, room + 1).and_then(|_| arena.take(&format.results(), room + 1));
        assert!(more.is_none(), "{bytes} bytes have room for more than {room}");
    }
}

/// It may be alive and still write there, whenever the block is let go of: before the recovery, after it, or after
/// another.
#[test]
fn what_a_lost_rank_may_touch_is_never_handed_out_again() {
    let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
    for (lost, drops) in [(true, 0), (true, 1), (true, 2), (false, 0), (false, 1), (false, 2)] {
        let arena = Arena::new(Offset(SLOT_ALIGN).span(format.block_bytes(1)));
        let mut held = Some(Held::new(&arena, arena.take(&format, 1).unwrap()));
        held.as_ref().unwrap().offer();
        for recovery in 0..3 {
            if recovery == drops {
                drop(held.take());
            }
            arena.recovered(lost && recovery == 0);
        }
        assert_eq!(arena.take(&format, 1).is_none(), lost, "let go of before recovery {drops}");
    }
}

/// A call that nobody waited for has failed: its block was given back, and taken again in other pieces.
#[test]
fn what_a_lost_rank_was_told_of_is_never_handed_out_again_whoever_has_it() {
    let format = RowFormat::new(&Shape::builder().hidden(1024).topk(1).build().unwrap());
    for lost in [true, false] {
        let arena = Arena::new(Offset(SLOT_ALIGN).span(format.block_bytes(1) * 8));
        let told = arena.take(&format, 2).unwrap();
        let all = |arena: &Arena| std::iter::from_fn(|| arena.take(&format, 1)).collect::<Vec<_>>();
        let meets = |block: &Block| block.span().offset.0 < told.span().end();
        arena.give(&told);
        let mut held: Vec<_> = all(&arena).into_iter().map(|block| Held::new(&arena, block)).collect();
        let before = held.len();
        drop(held.split_off(1));
        arena.suspect(&told);
        arena.suspect(&told);
        assert!(arena.take(&format, 1).is_none(), "nothing is handed out before all have recovered");
        arena.recovered(lost);
        let later = all(&arena);
        assert_eq!(later.iter().any(meets), !lost);
        later.iter().for_each(|block| arena.give(block));
        drop(held);
        arena.recovered(false);
        let last = all(&arena);
        assert_eq!(last.iter().any(meets), !lost, "whoever had it gave it back later");
        assert!(
            if lost { (before - 2..before).contains(&last.len()) } else { last.len() == before },
            "the rest is there"
        );
    }
}

/// Rows that a combine has offered which failed are given back in one of the next generation, which ends well.
#[test]
fn what_was_offered_to_a_lost_rank_stays_barred_after_another_offer() {
    let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
    let arena = Arena::new(Offset(SLOT_ALIGN).span(format.block_bytes(1)));
    let held = Held::new(&arena, arena.take(&format, 1).unwrap());
    held.offer();
    arena.recovered(true);
    held.offer();
    held.take_back();
    drop(held);
    assert!(arena.take(&format, 1).is_none(), "handed out again, though a lost rank was offered it");
}

#[test]
fn memory_is_grantable_when_nobody_holds_it() {
    let format = RowFormat::new(&Shape::builder().hidden(32).topk(1).build().unwrap());
    let arena = Arena::new(Offset(SLOT_ALIGN).span(format.block_bytes(1)));
    let lease = Arc::new(Held::new(&arena, arena.take(&format, 1).unwrap()));
    let other = Arc::clone(&lease);
    drop(lease);
    assert!(arena.take(&format, 1).is_none(), "another still holds it");
    other.offer();
    drop(other);
    assert!(arena.take(&format, 1).is_none(), "a peer may touch it until all have recovered");
    arena.recovered(false);
    assert!(arena.take(&format, 1).is_some());
}
