//! A frame as a TUN device gives and takes it: ten bytes about offloads, then an IP packet. The
//! packet may be a super-segment: one TCP segment of up to 64 KiB that stands for many of one MTU.
//!
//! ```text
//!  0 flags (1: the checksum is left to the device)   4 bytes of payload per segment
//!  1 kind (1: TCP over IPv4, to be segmented)        6 where the sum starts, in the packet
//!  2 bytes of headers                                8 where the sum goes, after that
//! ```
//! Numbers of two bytes are in the machine's own order here, in network order inside the packet.

use rand::{Rng, RngExt};
use std::ops::Range;

/// Bytes before the IP packet.
pub(super) const PREFIX_BYTES: usize = 10;
/// No frame is larger: an IPv4 packet has at most 65,535 bytes.
pub(super) const FRAME_BYTES_MAX: usize = PREFIX_BYTES + 65_535;

const CHECKSUM_IS_LEFT: u8 = 1;
const KIND_TCP4: u8 = 1;
/// Set beside the kind when the segments carry congestion marks.
const KIND_MARKED: u8 = 0x80;

const PROTOCOL_TCP: u8 = 6;
const TCP_FIN: u8 = 0x01;
const TCP_PSH: u8 = 0x08;
const TCP_CWR: u8 = 0x80;

/// How a frame divides into packets of at most one MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes of headers, which every packet repeats.
    headers: usize,
    /// Bytes to be divided; 0 when the frame is one packet.
    payload: usize,
    /// Bytes of payload in each packet but the last.
    segment: usize,
}

impl Shape {
    /// Looks at a frame.
    pub(super) fn of(frame: &[u8]) -> Shape {
        let single =
            Shape { headers: frame.len().saturating_sub(PREFIX_BYTES), payload: 0, segment: 1 };
        let [flags, kind, ..] = frame else { return single };
        let is_super = kind & !KIND_MARKED == KIND_TCP4 && flags & CHECKSUM_IS_LEFT != 0;
        let Some(tcp) = Tcp::of(frame).filter(|_| is_super) else { return single };
        let segment = usize::from(u16::from_ne_bytes([frame[4], frame[5]]));
        let payload = frame.len() - tcp.payload;
        if segment == 0 || payload <= segment {
            return single;
        }
        Shape { headers: tcp.payload - PREFIX_BYTES, payload, segment }
    }

    /// How many packets of at most one MTU the frame stands for; at least 1.
    pub(super) fn packets(&self) -> usize {
        self.payload.div_ceil(self.segment).max(1)
    }

    /// What these of its packets have in bytes on the wire, each with headers of its own.
    pub(super) fn wire_bytes(&self, packets: &Range<usize>) -> u64 {
        let payload = self.bytes_of(packets);
        (packets.len() * self.headers + payload.len()) as u64
    }

    fn bytes_of(&self, packets: &Range<usize>) -> Range<usize> {
        let end = self.payload.min(packets.end * self.segment);
        end.min(packets.start * self.segment)..end
    }

    /// Writes a frame that stands for these packets of a super-segment alone, and returns its
    /// length.
    pub(super) fn cut_out(&self, frame: &[u8], packets: &Range<usize>, out: &mut [u8]) -> usize {
        let begin = PREFIX_BYTES + self.headers;
        let bytes = self.bytes_of(packets);
        let len = begin + bytes.len();
        out[..begin].copy_from_slice(&frame[..begin]);
        out[begin..len].copy_from_slice(&frame[begin + bytes.start..begin + bytes.end]);
        // As far as the kernel keeps headers in one piece, which need not be less than this piece.
        out[2..4].copy_from_slice(&(self.headers as u16).to_ne_bytes());
        if packets.len() == 1 {
            // An ordinary packet: neither a kind nor a size of segments.
            out[1] = 0;
            out[4..6].fill(0);
        }
        let is_last = packets.end == self.packets();
        let Some(tcp) = Tcp::of(&out[..len]) else { return len };
        let (ip, transport) = out[PREFIX_BYTES..len].split_at_mut(tcp.header - PREFIX_BYTES);

        let total = (ip.len() + transport.len()) as u16;
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        let identity = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(packets.start as u16);
        ip[4..6].copy_from_slice(&identity.to_be_bytes());
        ip[10..12].fill(0);
        let sum = !folded_sum(ip, 0);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());

        let sequence = u32::from_be_bytes([transport[4], transport[5], transport[6], transport[7]]);
        let sequence = sequence.wrapping_add(bytes.start as u32);
        transport[4..8].copy_from_slice(&sequence.to_be_bytes());
        if packets.start > 0 {
            transport[13] &= !TCP_CWR;
        }
        if !is_last {
            transport[13] &= !(TCP_FIN | TCP_PSH);
        }
        // Where the checksum is left to the device, the field holds the part that the addresses,
        // the protocol and the length give; the length is another now.
        let part = pseudo_header_sum(ip, transport.len());
        transport[16..18].copy_from_slice(&part.to_be_bytes());
        len
    }
}

/// Where the parts of a TCP packet over IPv4 begin in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tcp {
    header: usize,
    payload: usize,
}

impl Tcp {
    /// `None` for anything else, later fragments included.
    fn of(frame: &[u8]) -> Option<Tcp> {
        let ip = frame.get(PREFIX_BYTES..)?;
        let ip_bytes = usize::from(ip.first()? & 0x0f) * 4;
        let is_tcp4 = ip[0] >> 4 == 4 && ip_bytes >= 20 && *ip.get(9)? == PROTOCOL_TCP;
        let fragment_offset = u16::from_be_bytes([*ip.get(6)?, *ip.get(7)?]) & 0x1fff;
        if !is_tcp4 || fragment_offset != 0 {
            return None;
        }
        let tcp_bytes = usize::from(ip.get(ip_bytes + 12)? >> 4) * 4;
        let header = PREFIX_BYTES + ip_bytes;
        let payload = header + tcp_bytes;
        (tcp_bytes >= 20 && payload <= frame.len()).then_some(Tcp { header, payload })
    }
}

/// Flips one bit of TCP's payload, and mends the checksum so that TCP accepts it. `false` when
/// the frame carries none.
pub(super) fn flip_bit(frame: &mut [u8], random: &mut impl Rng) -> bool {
    let Some(tcp) = Tcp::of(frame).filter(|tcp| tcp.payload < frame.len()) else { return false };
    let at = random.random_range(tcp.payload..frame.len());
    let bit = 1_u8 << random.random_range(0..8);
    // The sum is over words of two bytes, counted from TCP's header.
    let is_high = (at - tcp.header).is_multiple_of(2);
    let word = |byte: u8| if is_high { u16::from(byte) << 8 } else { u16::from(byte) };
    let (before, after) = (word(frame[at]), word(frame[at] ^ bit));
    frame[at] ^= bit;
    // Where the checksum is left to the device, nobody has summed the payload yet.
    if frame[0] & CHECKSUM_IS_LEFT == 0 {
        let field = tcp.header + 16..tcp.header + 18;
        let old = u16::from_be_bytes([frame[field.start], frame[field.start + 1]]);
        let sum = fold(u64::from(!old) + u64::from(!before) + u64::from(after));
        frame[field].copy_from_slice(&(!sum).to_be_bytes());
    }
    true
}

/// What IP's addresses, the protocol and the length of the segment add to TCP's checksum.
fn pseudo_header_sum(ip: &[u8], segment_bytes: usize) -> u16 {
    folded_sum(&ip[12..20], u64::from(PROTOCOL_TCP) + segment_bytes as u64)
}

/// The ones' complement sum of big-endian words; an odd last byte counts as a high one.
fn folded_sum(bytes: &[u8], initial: u64) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|word| u64::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)])));
    fold(initial + words.sum::<u64>())
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    const HEADERS: usize = 20 + 32;
    const SEGMENT: usize = 1448;

    /// A super-segment (or, of at most one segment, an ordinary packet) as the kernel makes it.
    fn frame(payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; PREFIX_BYTES + HEADERS];
        frame[0] = CHECKSUM_IS_LEFT;
        if payload.len() > SEGMENT {
            frame[1] = KIND_TCP4;
            frame[4..6].copy_from_slice(&(SEGMENT as u16).to_ne_bytes());
        }
        let ip = &mut frame[PREFIX_BYTES..];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&((HEADERS + payload.len()) as u16).to_be_bytes());
        ip[4..6].copy_from_slice(&0xfffe_u16.to_be_bytes());
        ip[9] = PROTOCOL_TCP;
        ip[12..20].copy_from_slice(&[10, 77, 0, 1, 10, 77, 0, 2]);
        let part = pseudo_header_sum(ip, 32 + payload.len());
        let tcp = &mut ip[20..];
        tcp[4..8].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
        tcp[12] = 8 << 4;
        tcp[13] = TCP_FIN | TCP_PSH | TCP_CWR | 0x10;
        tcp[16..18].copy_from_slice(&part.to_be_bytes());
        frame.extend_from_slice(payload);
        frame
    }

    /// Does what a device does with a checksum that is left to it.
    fn fill_checksum(frame: &mut [u8]) {
        assert_eq!(frame[0], CHECKSUM_IS_LEFT);
        frame[0] = 0;
        let sum = !folded_sum(&frame[PREFIX_BYTES + 20..], 0);
        frame[PREFIX_BYTES + 36..][..2].copy_from_slice(&sum.to_be_bytes());
    }

    fn is_accepted(frame: &[u8]) -> bool {
        let ip = &frame[PREFIX_BYTES..];
        let pseudo = u64::from(pseudo_header_sum(ip, ip.len() - 20));
        folded_sum(&ip[20..], pseudo) == 0xffff
    }

    #[test]
    fn an_ordinary_packet_is_one() {
        let shape = Shape::of(&frame(&[7; 100]));
        assert_eq!(shape.packets(), 1);
        assert_eq!(shape.wire_bytes(&(0..1)), (HEADERS + 100) as u64);
        assert_eq!(Shape::of(&[]).packets(), 1);
        assert_eq!(Shape::of(&[1, 1, 0]).wire_bytes(&(0..1)), 0);
    }

    #[test]
    fn a_super_segment_counts_the_headers_of_all_its_packets() {
        let shape = Shape::of(&frame(&vec![7; 10 * SEGMENT + 1]));
        assert_eq!(shape.packets(), 11);
        assert_eq!(shape.wire_bytes(&(0..11)), (11 * HEADERS + 10 * SEGMENT + 1) as u64);
        assert_eq!(shape.wire_bytes(&(3..5)), 2 * (HEADERS + SEGMENT) as u64);
        assert_eq!(shape.wire_bytes(&(10..11)), (HEADERS + 1) as u64);
    }

    #[test]
    fn pieces_give_the_whole_and_each_is_a_good_packet() {
        let payload: Vec<u8> = (0..10 * SEGMENT + 701).map(|i| (i * 7 % 251) as u8).collect();
        let whole = frame(&payload);
        let shape = Shape::of(&whole);
        for together in [1, 3, 11] {
            let mut out = vec![0; FRAME_BYTES_MAX];
            let mut seen = Vec::new();
            for from in (0..11).step_by(together) {
                let packets = from..(from + together).min(11);
                let len = shape.cut_out(&whole, &packets, &mut out);
                let mut piece = out[..len].to_vec();
                let inner = Shape::of(&piece);
                assert_eq!(inner.packets(), packets.len());
                assert_eq!(inner.wire_bytes(&(0..inner.packets())), shape.wire_bytes(&packets));
                let ip = &piece[PREFIX_BYTES..];
                assert_eq!(folded_sum(&ip[..20], 0), 0xffff, "the header's own checksum");
                assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len());
                assert_eq!(
                    u16::from_be_bytes([ip[4], ip[5]]),
                    0xfffe_u16.wrapping_add(from as u16)
                );
                let sequence = u32::from_be_bytes(ip[24..28].try_into().unwrap());
                assert_eq!(sequence, 0xffff_ff00_u32.wrapping_add((from * SEGMENT) as u32));
                let (first, last) = (from == 0, packets.end == 11);
                assert_eq!(ip[33] & TCP_CWR != 0, first);
                assert_eq!(ip[33] & (TCP_FIN | TCP_PSH) == TCP_FIN | TCP_PSH, last);
                seen.extend_from_slice(&ip[HEADERS..]);
                fill_checksum(&mut piece);
                assert!(is_accepted(&piece));
            }
            assert!(seen == payload, "pieces of {together}");
        }
    }

    #[test]
    fn a_flipped_bit_is_one_bit_that_tcp_accepts() {
        let mut random = StdRng::seed_from_u64(1);
        for len in [1, 2, 3, 100, 1447] {
            for round in 0..200 {
                let payload: Vec<u8> = (0..len).map(|_| random.random()).collect();
                let mut left = frame(&payload);
                let part = left[PREFIX_BYTES + 36..][..2].to_vec();
                assert!(flip_bit(&mut left, &mut random));
                assert_eq!(left[PREFIX_BYTES + 36..][..2], part, "the device is to sum it");

                let mut whole = frame(&payload);
                fill_checksum(&mut whole);
                assert!(is_accepted(&whole));
                assert!(flip_bit(&mut whole, &mut random));
                assert!(is_accepted(&whole), "{len} bytes, round {round}");
                let arrived = &whole[PREFIX_BYTES + HEADERS..];
                let bits: u32 =
                    arrived.iter().zip(&payload).map(|(a, b)| (a ^ b).count_ones()).sum();
                assert_eq!(bits, 1);
            }
        }
    }

    #[test]
    fn what_carries_no_tcp_payload_is_left_alone() {
        let mut random = StdRng::seed_from_u64(1);
        let mut datagram = frame(b"x");
        datagram[PREFIX_BYTES + 9] = 17;
        for mut frame in [frame(b""), datagram, Vec::new(), vec![0x45; 12]] {
            let before = frame.clone();
            assert!(!flip_bit(&mut frame, &mut random));
            assert_eq!(frame, before);
        }
    }
}
