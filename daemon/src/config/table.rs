//! One declaration for each key of a table: meaning, type, default, reader, fix.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use nightporter_boost::protocol::Budget;
use nightporter_core::congestion::Algorithm;
use nightporter_core::port::Local;
use nightporter_registry::etcd::Endpoint;

use super::keys::quoted;
use super::{UplinkKind, boost, registry};

/// Declares a table: the struct, `keys` that writes it down and `read` that reads it from a
/// [`Section`](super::reader::Section). Behind a key's type is how it is read, with the fix for a
/// wrong value last:
///
/// - `optional(READER, FIX)` is `None` if it is not given,
/// - `default(VALUE, READER, FIX)` is the value then,
/// - `flag(VALUE)` is that for `true` and `false`,
/// - `required(READER, FIX)` reports a mistake then,
/// - `by(EXPRESSION)` is anything else, out of the keys before it.
///
/// It is written down as [`Shown`] has it, or by `shown(FUNCTION)` of the table.
macro_rules! table {
    ($(#[$meta:meta])* $name:ident($s:ident $(, $arg:ident: $type:ty)*) {
        $($(#[$doc:meta])* $key:ident: $value:ty = $how:ident($($rest:tt)*)
            $(, shown($show:expr))?;)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Eq, PartialEq)]
        pub struct $name { $($(#[$doc])* pub $key: $value,)* }

        impl $name {
            /// All keys of the table.
            #[must_use]
            pub fn keys(&self) -> $crate::config::keys::Keys {
                vec![$((
                    stringify!($key),
                    $crate::config::table::table!(@show self $key $($show)?),
                ),)*]
            }

            fn read($s: &mut $crate::config::reader::Section<'_, '_> $(, $arg: $type)*) -> Self {
                $(let $key: $value = $crate::config::table::table!(@$how $s $key, $($rest)*);)*
                Self { $($key),* }
            }
        }
    };
    (@show $self:ident $key:ident) => { $crate::config::table::Shown::shown(&$self.$key) };
    (@show $self:ident $key:ident $show:expr) => {{
        let show: fn(&Self) -> Option<String> = $show;
        show($self)
    }};
    (@optional $s:ident $key:ident, $read:expr, $fix:expr) => {
        $s.get(stringify!($key), $fix, $read)
    };
    (@default $s:ident $key:ident, $default:expr, $read:expr, $fix:expr) => {
        $s.get(stringify!($key), $fix, $read).unwrap_or_else(|| $default)
    };
    (@flag $s:ident $key:ident, $default:expr) => {{
        let fix = concat!("write ", stringify!($key), " = true or false");
        $s.get(stringify!($key), fix, $crate::config::reader::boolean).unwrap_or($default)
    }};
    (@required $s:ident $key:ident, $read:expr, $fix:expr) => {
        $s.require(stringify!($key), $fix, $read).unwrap_or_default()
    };
    (@by $s:ident $key:ident, $value:expr) => { $value };
}
pub(super) use table;

/// A value as TOML has it; `None`: the key is not given.
pub(super) trait Shown {
    fn shown(&self) -> Option<String>;
}

impl<T: Shown> Shown for Option<T> {
    fn shown(&self) -> Option<String> {
        self.as_ref().and_then(T::shown)
    }
}

/// An empty list is not given.
impl<T: Shown> Shown for Vec<T> {
    fn shown(&self) -> Option<String> {
        let list: Vec<_> = self.iter().filter_map(T::shown).collect();
        (!list.is_empty()).then(|| format!("[{}]", list.join(", ")))
    }
}

macro_rules! shown {
    ($($it:ident: $($type:ty),+ => $text:expr;)*) => {
        $($(impl Shown for $type {
            fn shown(&self) -> Option<String> {
                let $it = self;
                Some($text)
            }
        })+)*
    };
}

shown! {
    it: bool, u8, u16, u32, u64, usize => it.to_string();
    it: String, IpAddr, SocketAddr => quoted(it);
    it: PathBuf => quoted(it.display());
    it: [u8; 6] => quoted(it.map(|byte| format!("{byte:02x}")).join(":"));
    it: UplinkKind => quoted(it.label());
    it: Local => quoted(it.label());
    it: Algorithm => quoted(it.label());
    it: Budget => quoted(boost::shown_as(*it));
    it: Endpoint => quoted(registry::url(it));
}
