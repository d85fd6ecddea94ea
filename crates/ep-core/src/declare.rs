//! Rust types declared in C: one definition of everything that the host and kernels share.
//!
//! [`c_struct!`](crate::c_struct) defines a Rust struct and says it in C++, with its size and the offset of every field asserted there;
//! [`c_enum!`](crate::c_enum) defines numbers with names. Comments are the Rust documentation. So a field that is added, moved or widened
//! on one side only does not compile on the other.
//!
//! ```
//! use ep_core::declare::CStruct;
//!
//! ep_core::c_struct! {
//!     /// Where a row lies.
//!     pub struct Place = "EpPlace" {
//!         /// Its first byte.
//!         pub address: u64,
//!         /// Bytes.
//!         pub bytes: u32,
//!         /// Zero.
//!         pub reserved: u32,
//!     }
//! }
//! assert!(Place::declaration().contains("    ep_u32 bytes; /* Bytes. */\n"));
//! assert!(Place::declaration().contains("__builtin_offsetof(EpPlace, reserved) == 12"));
//!
//! // For kernels that are compiled for places of one size.
//! let fixed = Place { address: 0, bytes: 64, reserved: 0 }.fixed(&["bytes"]);
//! assert!(fixed.contains("    static constexpr ep_u32 bytes = 64u;\n"));
//! ```

use std::fmt::Write;

/// A field type and how C++ declares a field of it.
pub trait CType {
    /// The declaration of `field`, without its semicolon.
    fn declare(field: &str) -> String;

    /// The value in C++, where it may stand for a constant.
    fn constant(&self) -> Option<String> {
        None
    }
}

/// A struct that host and kernels share, made by [`c_struct!`](crate::c_struct).
pub trait CStruct {
    /// Its definition in C++, and the assertions of its size and offsets.
    fn declaration() -> String
    where
        Self: Sized,
    {
        Self::declared(None)
    }

    /// The same for kernels that are compiled for the values that these `fields` have here: whole numbers are constants, under the names of their fields.
    /// The fields lie where they lay, and `_given` follows their names.
    fn fixed(&self, fields: &[&str]) -> String
    where
        Self: Sized,
    {
        Self::declared(Some((self, fields)))
    }

    #[doc(hidden)]
    fn declared(fixed: Option<(&Self, &[&str])>) -> String;
}

/// Numbers with names, made by [`c_enum!`](crate::c_enum).
pub trait CEnum {
    /// A `#define` for each.
    fn declaration() -> String;
}

macro_rules! c_types {
    ($($rust:ty => $c:literal $(, $suffix:literal)?;)*) => {
        $(impl CType for $rust {
            fn declare(field: &str) -> String {
                format!("{} {field}", $c)
            }

            $(fn constant(&self) -> Option<String> {
                Some(format!("{self}{}", $suffix))
            })?
        })*
    };
}

c_types! {
    u32 => "ep_u32", "u";
    u64 => "ep_u64", "ull";
    i32 => "ep_i32";
    f32 => "ep_f32";
}

impl<T: CType, const N: usize> CType for [T; N] {
    fn declare(field: &str) -> String {
        T::declare(&format!("{field}[{N}]"))
    }
}

/// A field of a struct: its declaration, offset and documentation; where it is fixed, the constant in its place.
#[doc(hidden)]
#[derive(Debug)]
pub struct Field {
    pub name: String,
    pub declaration: String,
    pub offset: usize,
    pub says: String,
    pub constant: Option<String>,
}

impl Field {
    /// Its value, where it always has that one.
    #[doc(hidden)]
    pub fn new<T: CType>(name: &str, offset: usize, says: &[&str], fixed: Option<&T>) -> Self {
        let (plainly, says) = (T::declare(name), plain(says));
        let Some(value) = fixed.and_then(CType::constant) else {
            return Self { name: name.to_owned(), declaration: plainly, offset, says, constant: None };
        };
        let (given, constant) = (format!("{name}_given"), format!("static constexpr {plainly} = {value}"));
        Self { declaration: T::declare(&given), name: given, offset, says, constant: Some(constant) }
    }
}

/// Documentation as a comment says it: one line, without links and code marks.
#[doc(hidden)]
pub fn plain(lines: &[&str]) -> String {
    let text = lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    text.replace("[`", "").replace("`]", "").replace('`', "")
}

#[doc(hidden)]
pub fn structure(name: &str, says: &str, size: usize, fields: &[Field]) -> String {
    let mut out = format!("\n/* {says} */\nstruct {name} {{\n");
    for Field { declaration, says, constant, .. } in fields {
        let _ = writeln!(out, "    {declaration}; /* {says} */");
        if let Some(constant) = constant {
            let _ = writeln!(out, "    {constant};");
        }
    }
    let _ = writeln!(out, "}};\nstatic_assert(sizeof({name}) == {size}, \"{name}\");");
    for Field { name: field, offset, .. } in fields {
        let _ = writeln!(out, "static_assert(__builtin_offsetof({name}, {field}) == {offset}, \"{name}.{field}\");");
    }
    out
}

/// `CamelCase` as `UPPER_SNAKE_CASE`.
pub(crate) fn upper_snake(name: &str) -> String {
    let mut out = String::new();
    for (at, letter) in name.char_indices() {
        if at > 0 && letter.is_uppercase() {
            out.push('_');
        }
        out.push(letter.to_ascii_uppercase());
    }
    out
}

#[doc(hidden)]
pub fn number(prefix: &str, name: &str, value: u32, says: &str) -> String {
    let comment = if says.is_empty() { String::new() } else { format!(" /* {says} */") };
    format!("#define {prefix}_{} {value}u{comment}\n", upper_snake(name))
}

/// Defines a struct that kernels share: documentation, visibility, its name in Rust and in C++, fields.
///
/// It is `repr(C)`, has no padding (that is checked) and copies to and from bytes. More derives may stand behind its documentation.
#[macro_export]
macro_rules! c_struct {
    (
        $(#[doc = $says:literal])+
        $(#[derive($($more:ident),+)])?
        $vis:vis struct $name:ident = $c:literal {
            $($(#[doc = $field_says:literal])+ $field_vis:vis $field:ident: $type:ty),+ $(,)?
        }
    ) => {
        $(#[doc = $says])+
        #[derive(Clone, Copy, PartialEq, Debug, Default)]
        #[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)]
        $(#[derive($($more),+)])?
        #[repr(C)]
        $vis struct $name {
            $($(#[doc = $field_says])+ $field_vis $field: $type,)+
        }

        impl $crate::declare::CType for $name {
            fn declare(field: &str) -> String {
                format!("{} {field}", $c)
            }
        }

        impl $crate::declare::CStruct for $name {
            fn declared(fixed: Option<(&Self, &[&str])>) -> String {
                let says = $crate::declare::plain(&[$($says),+]);
                let fields = [$($crate::declare::Field::new(
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    &[$($field_says),+],
                    fixed.filter(|(_, fields)| fields.contains(&stringify!($field))).map(|(all, _)| &all.$field),
                )),+];
                $crate::declare::structure($c, &says, size_of::<$name>(), &fields)
            }
        }
    };
}

/// Defines numbers that kernels share: an enum of `u32`, its name in Rust and the prefix of its names in C++. `name()` is the documentation of
/// a number, so it may be what users read.
#[macro_export]
macro_rules! c_enum {
    (
        $(#[doc = $says:literal])+
        $vis:vis enum $name:ident = $prefix:literal {
            $($(#[doc = $number_says:literal])+ $number:ident = $value:literal),+ $(,)?
        }
    ) => {
        $(#[doc = $says])+
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u32)]
        $vis enum $name {
            $($(#[doc = $number_says])+ $number = $value),+
        }

        impl $name {
            /// Each of them.
            $vis const ALL: &'static [Self] = &[$(Self::$number),+];

            /// The one with this number.
            $vis fn of(number: u32) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| *one as u32 == number)
            }

            /// Its documentation.
            $vis fn name(self) -> &'static str {
                match self {
                    $(Self::$number => concat!($($number_says),+)),+
                }
                .trim()
            }
        }

        impl $crate::declare::CEnum for $name {
            fn declaration() -> String {
                let numbers = Self::ALL.iter().map(|one| {
                    $crate::declare::number($prefix, &format!("{one:?}"), *one as u32, &$crate::declare::plain(&[one.name()]))
                });
                format!("\n/* {} */\n{}", $crate::declare::plain(&[$($says),+]), numbers.collect::<String>())
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    c_struct! {
        /// A pair, [`u32`] first
        /// and a run behind.
        struct Pair = "EpPair" {
            /// The first.
            first: u32,
            /// The others.
            others: [u32; 3],
        }
    }

    c_enum! {
        /// Ways to end.
        enum End = "EP_END" {
            /// Well.
            Well = 1,
            /// Out of time.
            OutOfTime = 4,
        }
    }

    #[test]
    fn a_struct_is_declared_with_its_offsets() {
        let expected = "\n/* A pair, u32 first and a run behind. */\nstruct EpPair {\n    ep_u32 first; /* The first. */\n    \
             ep_u32 others[3]; /* The others. */\n};\nstatic_assert(sizeof(EpPair) == 16, \"EpPair\");\n\
             static_assert(__builtin_offsetof(EpPair, first) == 0, \"EpPair.first\");\n\
             static_assert(__builtin_offsetof(EpPair, others) == 4, \"EpPair.others\");\n";
        assert_eq!(Pair::declaration(), expected);
    }

    #[test]
    fn numbers_have_the_names_of_the_field() {
        assert_eq!(
            End::declaration(),
            "\n/* Ways to end. */\n#define EP_END_WELL 1u /* Well. */\n#define EP_END_OUT_OF_TIME 4u /* Out of time. */\n"
        );
        assert_eq!((End::of(4), End::of(2)), (Some(End::OutOfTime), None));
        assert_eq!(End::Well.name(), "Well.");
    }
}
