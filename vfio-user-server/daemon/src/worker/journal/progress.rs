//! How far a session has come, in one word of the journal.

/// How far a session has come. One store changes all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of messages that are finished.
    pub finished: u64,
    /// Bytes of finished messages that are still in the socket.
    pub in_socket: usize,
    /// Whether a reply to the message at hand is sent, or about to be.
    pub replying: bool,
}

impl Progress {
    /// Bits of `replying`, and of it and `in_socket`.
    const REPLYING_BITS: u32 = 1;
    const LOW_BITS: u32 = 20;

    /// Returns the word.
    pub fn encode(self) -> u64 {
        self.finished << Self::LOW_BITS
            | (self.in_socket as u64) << Self::REPLYING_BITS
            | u64::from(self.replying)
    }

    /// Returns what a word says, which may be any.
    pub fn decode(word: u64) -> Self {
        let low = word & ((1 << Self::LOW_BITS) - 1);
        Self {
            finished: word >> Self::LOW_BITS,
            in_socket: (low >> Self::REPLYING_BITS) as usize,
            replying: low & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use vfio_user_server::journal::MAX_FINISHED;

    use super::*;

    #[test]
    fn a_word_says_what_was_written() {
        let all = Progress { finished: 1 << 43, in_socket: MAX_FINISHED, replying: true };
        for progress in [Progress::default(), all, Progress { replying: false, ..all }] {
            assert_eq!(Progress::decode(progress.encode()), progress);
        }
    }
}
