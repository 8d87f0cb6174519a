//! Error numbers in replies.

use std::fmt;
use std::io;
use std::num::NonZeroU16;

/// A nonzero Unix error number. Clients take an error reply with number 0 for success.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(NonZeroU16);

macro_rules! errnos {
    ($($name:ident: $what:literal,)*) => {
        impl Errno {
            $(
                #[doc = $what]
                pub const $name: Self = Self::known(libc::$name);
            )*
        }
    };
}

errnos! {
    EPERM: "Operation not permitted.",
    ENOENT: "No such entry: the range is not mapped.",
    EIO: "Input/output error.",
    ENXIO: "No such device or address.",
    ENOMEM: "Out of memory.",
    EACCES: "Permission denied: the region or mapping does not allow the access.",
    EFAULT: "Bad address.",
    EBUSY: "Device or resource busy.",
    EEXIST: "Exists already: the range overlaps a mapping.",
    ENODEV: "No such device: the device was removed.",
    EINVAL: "Invalid argument.",
    EMFILE: "Too many open files.",
    ENOSPC: "No space left: a limit was reached.",
    E2BIG: "Argument list too long.",
    EMSGSIZE: "Message too long.",
    ENOTSUP: "Not supported.",
    ENOTTY: "Not applicable: the device lacks the feature, or the interrupt the action.",
    EOVERFLOW: "Value too large.",
}

impl Errno {
    const fn known(raw: i32) -> Self {
        match Self::new(raw) {
            Some(errno) => errno,
            None => panic!("an errno of libc is out of range"),
        }
    }

    /// Returns the error with a number, or `None` if the number is not in 1 to 4095.
    pub const fn new(raw: i32) -> Option<Self> {
        if raw <= 0 || raw > 4095 {
            return None;
        }
        match NonZeroU16::new(raw.unsigned_abs() as u16) {
            Some(raw) => Some(Self(raw)),
            None => None,
        }
    }

    /// Returns the number.
    pub const fn raw(self) -> i32 {
        self.0.get() as i32
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", nix::errno::Errno::from_raw(self.raw()))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(nix::errno::Errno::from_raw(self.raw()).desc())
    }
}

impl std::error::Error for Errno {}

impl From<nix::errno::Errno> for Errno {
    fn from(errno: nix::errno::Errno) -> Self {
        Self::new(errno as i32).unwrap_or(Self::EIO)
    }
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        error.raw_os_error().and_then(Self::new).unwrap_or(Self::EIO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_zero() {
        assert_eq!(Errno::new(0), None);
        assert_eq!(Errno::new(-1), None);
        assert_eq!(Errno::from(io::Error::other("an error without a number")), Errno::EIO);
        assert_eq!(Errno::from(io::Error::from_raw_os_error(0)), Errno::EIO);
        assert_eq!(Errno::EINVAL.raw(), 22);
    }
}
