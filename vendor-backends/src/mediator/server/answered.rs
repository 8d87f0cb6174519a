//! Replies to a worker's requests that may have to be repeated.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use ipc::seqpacket;

use crate::mediator::wire::{ClientReply, ClientRequest, Numbered};

/// Limit of the replies that are kept. A worker records its state after each access of its VM,
/// which makes a few requests.
const MAX_REPLIES: usize = 8192;

/// Replies since the worker's last record of its state.
#[derive(Debug, Default)]
pub(super) struct Answered {
    /// Number of the last request.
    last: u64,
    /// Digests of the last requests and the replies to them, in order.
    replies: VecDeque<(u64, ClientReply)>,
}

/// What a request's number says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// The next request.
    New,
    /// A request that is carried out each time.
    EachTime,
    /// A request that was carried out, with this reply.
    Known(Box<ClientReply>),
    /// A request that was recorded, or that skips a number.
    Unknown,
}

impl Answered {
    /// Returns what a request's number says. A request other than the one that had this number
    /// before comes from a worker that gave up what its predecessor began: it is new.
    pub fn find(&mut self, number: u64, digest: u64) -> Repeat {
        if number == Numbered::NONE {
            return Repeat::EachTime;
        }
        let Some(back) = self.last.checked_sub(number) else {
            return if number == self.last + 1 { Repeat::New } else { Repeat::Unknown };
        };
        let back = usize::try_from(back).unwrap_or(usize::MAX);
        let Some(index) = self.replies.len().checked_sub(back.saturating_add(1)) else {
            return Repeat::Unknown;
        };
        match self.replies.get(index) {
            Some((known, reply)) if *known == digest => Repeat::Known(Box::new(reply.clone())),
            _ => {
                self.replies.truncate(index);
                self.last = number - 1;
                Repeat::New
            }
        }
    }

    /// Adds the reply to the next request.
    pub fn add(&mut self, digest: u64, reply: &ClientReply) {
        self.last += 1;
        if self.replies.len() >= MAX_REPLIES {
            self.replies.pop_front();
        }
        self.replies.push_back((digest, reply.clone()));
    }

    /// Adds the reply to a request that could not be read, and returns its number.
    pub fn add_next(&mut self, reply: &ClientReply) -> u64 {
        self.add(0, reply);
        self.last
    }

    /// Forgets the replies up to a number.
    pub fn forget(&mut self, recorded: u64) {
        let kept = usize::try_from(self.last.saturating_sub(recorded)).unwrap_or(usize::MAX);
        let surplus = self.replies.len().saturating_sub(kept);
        self.replies.drain(..surplus);
    }
}

/// Returns a digest of a request.
pub(super) fn digest(request: &ClientRequest) -> u64 {
    let mut hasher = DefaultHasher::new();
    // A request that was decoded can be encoded.
    seqpacket::encode(request).unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use mdev_core::ids::MemoryId;

    use super::*;

    fn reply(number: u64) -> ClientReply {
        ClientReply::Imported(MemoryId(number as u32))
    }

    fn known(number: u64) -> Repeat {
        Repeat::Known(Box::new(reply(number)))
    }

    #[test]
    fn each_request_is_carried_out_once() {
        let mut answered = Answered::default();
        for number in 1..=4 {
            assert_eq!(answered.find(number, 7), Repeat::New);
            answered.add(7, &reply(number));
        }
        answered.forget(2);
        for (number, expected) in [
            (0, Repeat::EachTime),
            (1, Repeat::Unknown),
            (2, Repeat::Unknown),
            (3, known(3)),
            (4, known(4)),
            (5, Repeat::New),
            (6, Repeat::Unknown),
            (u64::MAX, Repeat::Unknown),
        ] {
            assert_eq!(answered.find(number, 7), expected, "{number}");
        }
        assert_eq!(answered.add_next(&reply(5)), 5);
        answered.forget(u64::MAX);
        assert_eq!(answered.find(5, 7), Repeat::Unknown);
        assert_eq!(answered.find(6, 7), Repeat::New);
    }

    #[test]
    fn another_request_with_a_number_replaces_those_from_it_on() {
        let mut answered = Answered::default();
        (1..=4).for_each(|number| answered.add(number, &reply(number)));
        assert_eq!(answered.find(3, 3), known(3));
        assert_eq!(answered.find(3, 99), Repeat::New);
        answered.add(99, &reply(99));
        assert_eq!(answered.find(2, 2), known(2));
        assert_eq!(answered.find(3, 99), known(99));
        assert_eq!(answered.find(4, 4), Repeat::New);
    }

    #[test]
    fn the_number_of_replies_is_limited() {
        let mut answered = Answered::default();
        (0..2 * MAX_REPLIES).for_each(|_| answered.add(0, &ClientReply::Done));
        assert_eq!(answered.replies.len(), MAX_REPLIES);
        assert_eq!(answered.find(MAX_REPLIES as u64, 0), Repeat::Unknown);
        assert_eq!(
            answered.find(MAX_REPLIES as u64 + 1, 0),
            Repeat::Known(Box::new(ClientReply::Done))
        );
    }
}
