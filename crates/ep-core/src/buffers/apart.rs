//! FP8 rows whose scales lie in a tensor of their own.

use crate::error::Error;
use crate::layout::RowFormat;
use crate::shape::Shape;

/// Scales `[rows, words]` with any strides. A word is 4 bytes: one f32, or four UE8M0 bytes, those of neighbouring groups; what a row's
/// last word has beyond its groups is not looked at.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// Holds them, with whatever lies between.
    pub words: &'a [u32],
    /// Words from one row's scales to the next's.
    pub row: usize,
    /// Words from one word of a row to the next.
    pub word: usize,
}

impl Scales<'_> {
    /// Words of a row of `shape`; 0 where rows have no scales.
    pub const fn words_of(shape: &Shape) -> usize {
        RowFormat::new(shape).scales_bytes().div_ceil(4) as usize
    }

    /// Refuses codes and scales that are not those of `rows` rows of `shape`.
    ///
    /// # Errors
    /// [`Error::Invalid`], with what is allowed.
    pub fn check(&self, shape: &Shape, codes: &[u8], rows: u32) -> Result<(), Error> {
        let words = Self::words_of(shape);
        if words == 0 {
            return Err(Error::invalid("scales", "given", format_args!("none, of {} rows", shape.element())));
        }
        let (rows, hidden) = (rows as usize, shape.hidden() as usize);
        if codes.len() != rows * hidden {
            let limit = format_args!("{rows} rows of {hidden} bytes");
            return Err(Error::invalid("length of the codes in bytes", codes.len(), limit));
        }
        let last = (rows.saturating_sub(1)).checked_mul(self.row).zip((words - 1).checked_mul(self.word));
        let needed = last.and_then(|(row, word)| row.checked_add(word)?.checked_add(1)).unwrap_or(usize::MAX);
        if rows > 0 && needed > self.words.len() {
            let limit = format_args!("at least {needed}, for strides of {} and {}", self.row, self.word);
            return Err(Error::invalid("words of scales", self.words.len(), limit));
        }
        Ok(())
    }

    /// Rows as they travel: each row's codes, then its scales.
    ///
    /// # Errors
    /// Those of [`Scales::check`].
    pub fn joined(&self, shape: &Shape, codes: &[u8], rows: u32) -> Result<Vec<u8>, Error> {
        self.check(shape, codes, rows)?;
        let format = RowFormat::new(shape);
        let (row_bytes, hidden) = (format.payload_bytes() as usize, shape.hidden() as usize);
        let mut joined = vec![0; rows as usize * row_bytes];
        for (row, into) in joined.chunks_exact_mut(row_bytes).enumerate() {
            into[..hidden].copy_from_slice(&codes[row * hidden..][..hidden]);
            for (word, bytes) in into[format.scales_offset() as usize..].chunks_mut(4).enumerate() {
                let scales = self.words[row * self.row + word * self.word].to_ne_bytes();
                bytes.copy_from_slice(&scales[..bytes.len()]);
            }
        }
        Ok(joined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Element, Scaling};

    fn shape(element: Element, hidden: u32) -> Shape {
        Shape::builder().experts(4).topk(2).hidden(hidden).max_tokens(4).element(element).build().unwrap()
    }

    #[test]
    fn scales_of_any_strides_are_joined_to_their_codes() {
        let shape = shape(Element::Fp8(Scaling::Exact), 256);
        let codes: Vec<u8> = (0..512).map(|at| (at / 256) as u8).collect();
        let expected = Scales { words: &[10, 11, 20, 21], row: 2, word: 1 }.joined(&shape, &codes, 2).unwrap();
        assert_eq!(expected[256..264], [10u32.to_ne_bytes(), 11u32.to_ne_bytes()].concat()[..]);
        assert_eq!(expected[264], 1);
        let columns = Scales { words: &[10, 20, 0, 11, 21], row: 1, word: 3 };
        assert_eq!(columns.joined(&shape, &codes, 2).unwrap(), expected);
    }

    #[test]
    fn the_last_word_of_packed_scales_may_be_used_in_part() {
        let shape = shape(Element::Fp8(Scaling::Ue8m0), 640);
        let scales =
            Scales { words: &[u32::from_ne_bytes([1, 2, 3, 4]), u32::from_ne_bytes([5, 9, 9, 9])], row: 2, word: 1 };
        let joined = scales.joined(&shape, &[7; 640], 1).unwrap();
        assert_eq!(joined[640..], [1, 2, 3, 4, 5]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let fp8 = shape(Element::Fp8(Scaling::Exact), 256);
        let scales = Scales { words: &[0; 3], row: 2, word: 1 };
        let said = |shape: &Shape, codes: &[u8]| scales.joined(shape, codes, 2).unwrap_err().to_string();
        assert!(said(&fp8, &[0; 512]).contains("words of scales is 3, allowed: at least 4"));
        assert!(said(&fp8, &[0; 511]).contains("length of the codes in bytes is 511"));
        assert!(said(&shape(Element::Bf16, 256), &[0; 512]).contains("scales is given, allowed: none"));
        assert!(scales.joined(&fp8, &[], 0).unwrap().is_empty());
    }
}
