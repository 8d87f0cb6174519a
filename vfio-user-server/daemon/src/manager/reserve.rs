//! Descriptors that the manager keeps for the start of workers: other users of descriptors reach
//! the limit before.

use std::cell::RefCell;
use std::fs::File;
use std::io;

use nix::sys::resource::{Resource, getrlimit};
use vgpud_api::{ErrorCode, ErrorDetail};

use super::Result;

/// Number of descriptors. A start opens fewer.
const SIZE: usize = 24;

/// Reserve of descriptors.
#[derive(Debug, Default)]
pub struct Reserve(RefCell<Vec<File>>);

impl Reserve {
    /// Runs `work` with the descriptors of the reserve free, and takes them again. Refuses if the
    /// reserve is not complete.
    pub fn spend<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        self.fill().map_err(|error| {
            let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
            let message = format!(
                "vgpud has no descriptors left ({error}; the limit is {limit}); try again in a moment, or raise LimitNOFILE= of its service"
            );
            ErrorDetail::new(ErrorCode::Unavailable, message)
        })?;
        self.0.borrow_mut().clear();
        let result = work();
        // A reserve that is not complete is completed before the next use.
        let _ = self.fill();
        Ok(result)
    }

    fn fill(&self) -> io::Result<()> {
        let mut files = self.0.borrow_mut();
        while files.len() < SIZE {
            files.push(File::open("/dev/null")?);
        }
        Ok(())
    }
}
