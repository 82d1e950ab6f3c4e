//! As much of a DNS message as a forwarder must know (RFC 1035, 4.1).

/// The port of name servers.
pub(super) const PORT: u16 = 53;
/// Bytes of the header.
pub(super) const HEADER: usize = 12;
/// In the third byte: this is a response.
const QR: u8 = 0x80;
/// In the fourth byte: recursion is available.
const RA: u8 = 0x80;
/// Mask of the response code in the fourth byte.
const RCODE: u8 = 0x0f;
const SERVFAIL: u8 = 2;
const REFUSED: u8 = 5;
/// Longest name in wire form, in bytes (RFC 1035, 2.3.4).
const MAX_NAME: usize = 255;

/// What a datagram from a resolver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Not the answer to this query.
    Foreign,
    /// The resolver could not or would not answer.
    Failure,
    /// The answer.
    Final,
}

/// True for what can be a query: it has a header, and that is no response's.
pub(super) fn is_query(message: &[u8]) -> bool {
    message.len() >= HEADER && message[2] & QR == 0
}

/// Tells what `message` is to `query`, which was sent with `id`.
pub(super) fn check(message: &[u8], id: [u8; 2], query: &[u8]) -> Answer {
    if message.len() < HEADER || message[..2] != id || message[2] & QR == 0 {
        return Answer::Foreign;
    }
    // A server that fails may leave the question out.
    let has_question = message[4..6] != [0, 0];
    let failed = matches!(message[3] & RCODE, SERVFAIL | REFUSED);
    if let Some(end) = question_end(query) {
        let same = message
            .get(HEADER..end)
            .is_some_and(|echoed| echoed.eq_ignore_ascii_case(&query[HEADER..end]));
        if has_question && !same {
            return Answer::Foreign;
        }
    }
    if failed {
        Answer::Failure
    } else {
        Answer::Final
    }
}

/// A SERVFAIL response to `query`, which has a header.
pub(super) fn servfail(query: &[u8]) -> Vec<u8> {
    let end = question_end(query);
    let mut answer = query[..end.unwrap_or(HEADER)].to_vec();
    answer[2] |= QR;
    // Opcode and RD stay; nothing was truncated, nobody is authoritative.
    answer[2] &= !0x06;
    answer[3] = RA | SERVFAIL;
    let questions = u8::from(end.is_some());
    answer[4..HEADER].copy_from_slice(&[0, questions, 0, 0, 0, 0, 0, 0]);
    answer
}

/// Where the first question of `message` ends; `None` when there is no whole question.
fn question_end(message: &[u8]) -> Option<usize> {
    if message.get(4..6)? == [0, 0] {
        return None;
    }
    let mut at = HEADER;
    loop {
        let label = *message.get(at)?;
        at += 1 + usize::from(label);
        // Nothing precedes the question that a pointer could lead to.
        if label > 63 || at - HEADER > MAX_NAME {
            return None;
        }
        if label == 0 {
            break;
        }
    }
    // Type and class.
    (at + 4 <= message.len()).then_some(at + 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A query for a.test, type A, with an EDNS record.
    const QUERY: [u8; 35] = [
        0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, // header
        1, b'a', 4, b't', b'e', b's', b't', 0, 0, 1, 0, 1, // question
        0, 0, 41, 0x10, 0, 0, 0, 0, 0, 0, 0, // OPT
    ];

    #[test]
    fn a_servfail_is_these_bytes() {
        assert_eq!(
            servfail(&QUERY),
            [
                0x12, 0x34, 0x81, 0x82, 0, 1, 0, 0, 0, 0, 0, 0, //
                1, b'a', 4, b't', b'e', b's', b't', 0, 0, 1, 0, 1
            ]
        );
        assert_eq!(
            servfail(&QUERY[..20]),
            [0x12, 0x34, 0x81, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn answers_must_echo_id_and_question() {
        let mut answer = QUERY;
        answer[2] = 0x81;
        answer[13] = b'A';
        let id = [0x12, 0x34];
        assert_eq!(check(&answer, id, &QUERY), Answer::Final);
        assert_eq!(check(&answer, [0, 0], &QUERY), Answer::Foreign);
        assert_eq!(check(&QUERY, id, &QUERY), Answer::Foreign);
        answer[3] = 3;
        assert_eq!(check(&answer, id, &QUERY), Answer::Final);
        for code in [SERVFAIL, REFUSED] {
            answer[3] = code;
            assert_eq!(check(&answer, id, &QUERY), Answer::Failure);
        }
        answer[13] = b'b';
        assert_eq!(check(&answer, id, &QUERY), Answer::Foreign);
        answer[5] = 0;
        assert_eq!(check(&answer[..12], id, &QUERY), Answer::Failure);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(
            query in proptest::collection::vec(any::<u8>(), 12..64),
            answer in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            check(&answer, [query[0], query[1]], &query);
            prop_assert!(servfail(&query).len() >= HEADER);
        }
    }
}
