//! What lies on the disk, byte by byte. All integers are little-endian; a change here raises `FORMAT_VERSION`.
//!
//! ```text
//! ROOT/                        0700  the root; its cap covers everything below, as `du` counts it
//!   strata-disk-root           0600  marker: makes the folder a root and names the format
//!   lock                       0600  locked by the one writer, holds its process id
//!   <fingerprint, 64 hex>/     0700  one folder for each fingerprint
//!     segment-000000.kh        0600  superblock (4 KiB), then the headers of records 0 .. n-1, padded to 4 KiB
//!     segment-000000.kv        0600  the payloads of records 0 .. n-1, each padded to 4 KiB
//!     segment-000001.kh, .kv         records n .. 2n-1, and so on
//!     scratch.kh, .kv          0600  only while a disk that failed is tried
//!
//! superblock                          header of a record (P = page size in tokens)
//! offset size                         offset  size
//!   0     8  magic "STRATASG"           0       8  magic "STRATAKV"
//!   8     4  format version             8       4  format version
//!  12     4  records of the segment    12       4  page size P
//!  16     4  page size                 16       8  sequence: higher is newer
//!  20     4  payload bytes             24       8  payload bytes
//!  24     2  group                     32      16  payload checksum, xxh3-128
//!  26     2  shard                     48       2  group
//!  28     4  zero                      50       2  shard
//!  32    32  fingerprint               52       4  zero
//!  64     8  checksum, xxh3-64         56      32  fingerprint
//!                                      88      32  namespace
//!                                     120      32  key of the page before, or the namespace's root key
//!                                     152      32  key of this page
//!                                     184     4P   tokens
//!                                     184+4P   8   header checksum, xxh3-64 of all before it
//! ```
//!
//! Two files, because a small write through the page cache takes the file system's lock on its file alone, and would
//! wait for every payload in flight past the page cache if they shared one: measured, two thirds of a write's time.
//!
//! Torn writes. Headers share 4 KiB blocks: writing one rewrites its neighbours with the bytes they have, so a torn
//! block leaves every neighbour as it was, and a sector that a disk loses altogether fails its checksums: a miss.
//! Keeping a block to each header would cost 16 times the header reads at recovery and guard against nothing more.
//!
//! Order of a write: header cleared, payload, header. A process that dies leaves a cleared header or a whole record.
//! After a power loss any of the three may be missing or torn, but then the checksum over the payload, or that
//! over the header, does not agree.

use crate::geometry::Geometry;
use strata_types::{Fingerprint, GroupId, KeyHasher, Namespace, PageKey, PageRecord, ShardId, Token};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// The version of everything in this file.
pub const FORMAT_VERSION: u32 = 1;

const RECORD_MAGIC: &[u8; 8] = b"STRATAKV";
const SEGMENT_MAGIC: &[u8; 8] = b"STRATASG";
const RECORD_FIXED: usize = 184;
const SUPERBLOCK_USED: usize = 64;

/// What makes a header worthless.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HeaderError {
    /// All zero: never written, or cleared.
    #[error("it is blank")]
    Blank,
    /// Not this kind of block, or torn.
    #[error("its magic or checksum is wrong")]
    Checksum,
    /// Whole, but written by another format or for other pages.
    #[error("its {0} is another")]
    Mismatch(&'static str),
}

/// The header of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Higher is newer.
    pub sequence: u64,
    /// Bytes of the payload.
    pub payload_bytes: u64,
    /// xxh3-128 of the payload.
    pub payload_checksum: u128,
    /// The group.
    pub group: GroupId,
    /// The shard.
    pub shard: ShardId,
    /// What the pages of this store share.
    pub fingerprint: Fingerprint,
    /// Whose page it is.
    pub record: PageRecord,
}

impl RecordHeader {
    /// Whether it belongs into the segments of that superblock.
    pub(crate) fn is_of(&self, segment: &Superblock) -> bool {
        (self.fingerprint, self.group, self.shard) == (segment.fingerprint, segment.group, segment.shard)
            && self.payload_bytes == u64::from(segment.geometry.page_bytes)
    }

    /// Bytes of a header with this page size.
    pub fn length(page_size: u32) -> usize {
        RECORD_FIXED + 4 * page_size as usize + 8
    }

    /// Writes the header to the front of `out`, which must have `length(tokens)` bytes or more; the rest is cleared.
    pub fn encode(&self, out: &mut [u8]) {
        let mut writer = Writer { out, at: 0 };
        writer.put(RECORD_MAGIC);
        writer.put(&FORMAT_VERSION.to_le_bytes());
        writer.put(&(self.record.tokens.len() as u32).to_le_bytes());
        writer.put(&self.sequence.to_le_bytes());
        writer.put(&self.payload_bytes.to_le_bytes());
        writer.put(&self.payload_checksum.to_le_bytes());
        writer.put(&self.group.0.to_le_bytes());
        writer.put(&self.shard.0.to_le_bytes());
        writer.put(&[0; 4]);
        writer.put(&self.fingerprint.0);
        writer.put(&self.record.namespace.0);
        writer.put(&self.record.parent.0);
        writer.put(&self.record.key.0);
        for token in &self.record.tokens {
            writer.put(&token.to_le_bytes());
        }
        writer.seal();
    }

    /// Reads a header of a page of `page_size` tokens and proves that it is whole and its key its own.
    pub fn decode(bytes: &[u8], page_size: u32) -> Result<RecordHeader, HeaderError> {
        let length = RecordHeader::length(page_size);
        let bytes = bytes.get(..length).ok_or(HeaderError::Checksum)?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Err(HeaderError::Blank);
        }
        let mut reader = Reader::open(bytes, RECORD_MAGIC)?;
        if reader.u32() != FORMAT_VERSION {
            return Err(HeaderError::Mismatch("format version"));
        }
        if reader.u32() != page_size {
            return Err(HeaderError::Mismatch("page size"));
        }
        let sequence = reader.u64();
        let payload_bytes = reader.u64();
        let payload_checksum = u128::from_le_bytes(reader.take());
        let (group, shard) = (GroupId(reader.u16()), ShardId(reader.u16()));
        reader.u32();
        let fingerprint = Fingerprint(reader.take());
        let namespace = Namespace(reader.take());
        let (parent, key) = (PageKey(reader.take()), PageKey(reader.take()));
        let tokens: Vec<Token> = (0..page_size).map(|_| reader.u32()).collect();
        if parent.child(&tokens) != key {
            return Err(HeaderError::Mismatch("key"));
        }
        let record = PageRecord { namespace, parent, key, tokens };
        Ok(RecordHeader { sequence, payload_bytes, payload_checksum, group, shard, fingerprint, record })
    }
}

/// Everything by which a reader knows a page, in one digest: what the store keeps in memory of each header.
pub(crate) fn identity(record: &PageRecord) -> [u8; 32] {
    let mut hasher = KeyHasher::new("record");
    let tokens: Vec<u8> = record.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    hasher.field("namespace", &record.namespace.0).field("parent", &record.parent.0);
    hasher.field("key", &record.key.0).field("tokens", &tokens);
    hasher.finish()
}

/// The first block of a file of headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// How the segment is laid out.
    pub geometry: Geometry,
    /// The group.
    pub group: GroupId,
    /// The shard.
    pub shard: ShardId,
    /// What the pages of this store share.
    pub fingerprint: Fingerprint,
}

impl Superblock {
    /// The block as it is written.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; SUPERBLOCK_USED + 8];
        let mut writer = Writer { out: &mut out, at: 0 };
        writer.put(SEGMENT_MAGIC);
        writer.put(&FORMAT_VERSION.to_le_bytes());
        writer.put(&self.geometry.records_per_segment.to_le_bytes());
        writer.put(&self.geometry.page_size.to_le_bytes());
        writer.put(&self.geometry.page_bytes.to_le_bytes());
        writer.put(&self.group.0.to_le_bytes());
        writer.put(&self.shard.0.to_le_bytes());
        writer.put(&[0; 4]);
        writer.put(&self.fingerprint.0);
        writer.seal();
        out
    }

    /// Reads the first block of a file of headers.
    pub fn decode(bytes: &[u8]) -> Result<Superblock, HeaderError> {
        let bytes = bytes.get(..SUPERBLOCK_USED + 8).ok_or(HeaderError::Checksum)?;
        let mut reader = Reader::open(bytes, SEGMENT_MAGIC)?;
        if reader.u32() != FORMAT_VERSION {
            return Err(HeaderError::Mismatch("format version"));
        }
        let records_per_segment = reader.u32();
        let (page_size, page_bytes) = (reader.u32(), reader.u32());
        let (group, shard) = (GroupId(reader.u16()), ShardId(reader.u16()));
        reader.u32();
        let fingerprint = Fingerprint(reader.take());
        if records_per_segment == 0 || page_size == 0 || page_bytes == 0 {
            return Err(HeaderError::Mismatch("geometry"));
        }
        let geometry = Geometry { page_size, page_bytes, records_per_segment };
        Ok(Superblock { geometry, group, shard, fingerprint })
    }
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn seal(mut self) {
        let checksum = xxh3_64(&self.out[..self.at]);
        self.put(&checksum.to_le_bytes());
        self.out[self.at..].fill(0);
    }
}

/// Reads fields in order from bytes whose length and checksum `open` has proved.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn open(bytes: &'a [u8], magic: &[u8; 8]) -> Result<Reader<'a>, HeaderError> {
        let (body, seal) = bytes.split_at(bytes.len() - 8);
        if !body.starts_with(magic) || xxh3_64(body).to_le_bytes() != seal {
            return Err(HeaderError::Checksum);
        }
        Ok(Reader { bytes: body, at: magic.len() })
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        out
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(page_size: u32) -> RecordHeader {
        let namespace = Namespace::new("tenant", "adapter");
        let parent = namespace.root_key(GroupId(3));
        let tokens: Vec<u32> = (0..page_size).map(|token| token * 7 + 1).collect();
        RecordHeader {
            sequence: 42,
            payload_bytes: 1000,
            payload_checksum: 1 << 100,
            group: GroupId(3),
            shard: ShardId(1),
            fingerprint: Fingerprint([9; 32]),
            record: PageRecord { namespace, parent, key: parent.child(&tokens), tokens },
        }
    }

    #[test]
    fn headers_round_trip_and_every_flipped_bit_is_seen() {
        for page_size in [1, 16, 100] {
            let header = header(page_size);
            let mut bytes = vec![0xff; 1024];
            header.encode(&mut bytes);
            assert_eq!(RecordHeader::decode(&bytes, page_size), Ok(header));
            for bit in 0..RecordHeader::length(page_size) * 8 {
                let mut bad = bytes.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(RecordHeader::decode(&bad, page_size), Err(HeaderError::Checksum), "bit {bit}");
            }
        }
        assert_eq!(RecordHeader::decode(&[0; 256], 16), Err(HeaderError::Blank));
        assert_eq!(RecordHeader::decode(&[0; 10], 16), Err(HeaderError::Checksum));
    }

    #[test]
    fn a_key_that_is_not_its_tokens_is_refused() {
        let mut forged = header(16);
        forged.record.tokens[3] += 1;
        let mut bytes = vec![0; 256];
        forged.encode(&mut bytes);
        assert_eq!(RecordHeader::decode(&bytes, 16), Err(HeaderError::Mismatch("key")));
    }

    #[test]
    fn superblocks_round_trip() {
        let geometry = Geometry { page_size: 16, page_bytes: 737_280, records_per_segment: 5 };
        let block =
            Superblock { geometry, group: GroupId(1), shard: ShardId(2), fingerprint: Fingerprint([7; 32]) };
        let mut bytes = block.encode();
        assert_eq!(Superblock::decode(&bytes), Ok(block));
        bytes[12] ^= 1;
        assert_eq!(Superblock::decode(&bytes), Err(HeaderError::Checksum));
        assert!(Superblock::decode(&bytes[..20]).is_err());
    }

    #[test]
    fn the_layout_is_stable() {
        // A change of these bytes makes every root on disk unreadable: raise FORMAT_VERSION with them.
        let mut bytes = vec![0; 256];
        header(16).encode(&mut bytes);
        assert_eq!(&bytes[..16], b"STRATAKV\x01\0\0\0\x10\0\0\0");
        assert_eq!((bytes[16], bytes[24..26].to_vec(), bytes[44]), (42, vec![0xe8, 3], 16));
        assert_eq!((bytes[48], bytes[50], bytes[56], bytes[184]), (3, 1, 9, 1));
    }
}
