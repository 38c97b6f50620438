//! Where records lie: pure arithmetic from page id to segment and offset, and from a cap to a number of records.
//! The same inputs always give the same geometry; a segment's superblock says with which it was written.

use crate::format::RecordHeader;

/// The unit of allocation and of alignment on disk.
pub const BLOCK: u64 = 4096;

/// Segments that a root of unlimited cap would hold: each costs three file descriptors.
const MOST_SEGMENTS: u64 = 128;
/// Segments that a small root is cut into, so that a stale one frees little more than is needed.
const FEWEST_SEGMENTS: u64 = 8;
const USUAL_SEGMENT: u64 = 256 << 20;
/// Segments that an older geometry may need under a raised cap before it is given up for a larger one.
const MOST_INHERITED_SEGMENTS: u64 = 256;
/// Extents that a block of an ext4 extent tree describes.
const EXTENTS_PER_BLOCK: u64 = 340;
/// Root folder, fingerprint folder, marker, lock file and the two files of a trial, a block each.
const FIXED_COST: u64 = 6 * BLOCK;
/// The folder entries of a segment's two files, generously.
const FOLDER_ENTRIES: u64 = 128;

/// The layout of a store's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Tokens of a page.
    pub page_size: u32,
    /// Bytes of a payload.
    pub page_bytes: u32,
    /// Records of each segment.
    pub records_per_segment: u32,
}

impl Geometry {
    /// The geometry for a cap of which `available` bytes are left to this store; `None` if no record fits.
    pub fn choose(page_size: u32, page_bytes: u32, available: u64) -> Option<Geometry> {
        let room = available.checked_sub(FIXED_COST)?;
        let target = (room / FEWEST_SEGMENTS).min(USUAL_SEGMENT).max(room / MOST_SEGMENTS);
        let mut geometry = Geometry { page_size, page_bytes, records_per_segment: 1 };
        let payloads = target / geometry.payload_slot();
        geometry.records_per_segment = u32::try_from(payloads).unwrap_or(u32::MAX).max(1);
        while geometry.records_per_segment > 1 && geometry.segment_cost() > target {
            let excess = (geometry.segment_cost() - target).div_ceil(geometry.record_cost());
            let fewer = u64::from(geometry.records_per_segment).saturating_sub(excess.max(1)).max(1);
            geometry.records_per_segment = fewer as u32;
        }
        (geometry.segments_within(available) > 0).then_some(geometry)
    }

    /// Whether segments of this geometry are still reasonable under another cap.
    pub fn still_fits(&self, available: u64) -> bool {
        (1..=MOST_INHERITED_SEGMENTS).contains(&self.segments_within(available))
    }

    /// The least cap that holds one record.
    pub fn least_cap(page_size: u32, page_bytes: u32) -> u64 {
        Geometry { page_size, page_bytes, records_per_segment: 1 }.cap_of_one()
    }

    /// The least cap that holds one segment.
    pub fn cap_of_one(&self) -> u64 {
        FIXED_COST + self.segment_cost() + FOLDER_ENTRIES
    }

    /// Segments that a store which is running may grow to: more would not be kept by the next start.
    pub fn most_segments(&self, available: u64) -> u64 {
        self.segments_within(available).min(MOST_INHERITED_SEGMENTS)
    }

    /// Segments that a cap of `available` bytes holds.
    pub fn segments_within(&self, available: u64) -> u64 {
        let most_records = u64::from(u32::MAX) / u64::from(self.records_per_segment);
        (available.saturating_sub(FIXED_COST) / (self.segment_cost() + FOLDER_ENTRIES)).min(most_records)
    }

    /// Bytes from one header to the next. Up to a sector (512 bytes) it is a power of two, so that no header
    /// straddles sectors and a disk writes it whole or not at all; a larger header that is torn fails its checksum.
    pub fn header_slot(&self) -> u64 {
        let length = RecordHeader::length(self.page_size) as u64;
        if length <= 512 {
            length.next_power_of_two()
        } else {
            length.next_multiple_of(512)
        }
    }

    /// Bytes from one payload to the next.
    pub fn payload_slot(&self) -> u64 {
        u64::from(self.page_bytes).next_multiple_of(BLOCK)
    }

    /// Where the header of record `index` starts in its file of headers.
    pub fn header_offset(&self, index: u32) -> u64 {
        BLOCK + u64::from(index) * self.header_slot()
    }

    /// Bytes of a file of headers: superblock and headers, whole blocks.
    pub fn header_bytes(&self) -> u64 {
        self.header_offset(self.records_per_segment).next_multiple_of(BLOCK)
    }

    /// Where the payload of record `index` starts in its file of payloads.
    pub fn payload_offset(&self, index: u32) -> u64 {
        u64::from(index) * self.payload_slot()
    }

    /// Bytes of a file of payloads.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_offset(self.records_per_segment)
    }

    /// Bytes of both files of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.header_bytes() + self.payload_bytes()
    }

    /// The most blocks that a segment occupies, in bytes: its files and, where every second record is written, the
    /// blocks in which the file system keeps their extents.
    pub fn segment_cost(&self) -> u64 {
        let extents = 2 * u64::from(self.records_per_segment) + self.header_bytes() / BLOCK;
        self.segment_bytes() + BLOCK * (2 + extents.div_ceil(EXTENTS_PER_BLOCK))
    }

    /// The segment and the index in it of a page of the disk tier.
    pub fn locate(&self, page: u32) -> (usize, u32) {
        ((page / self.records_per_segment) as usize, page % self.records_per_segment)
    }

    /// The page of record `index` of a segment.
    pub fn page(&self, segment: usize, index: u32) -> u32 {
        segment as u32 * self.records_per_segment + index
    }

    fn record_cost(&self) -> u64 {
        self.payload_slot() + self.header_slot()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_of_16_tokens_has_a_header_of_256_bytes() {
        let geometry = Geometry { page_size: 16, page_bytes: 737_280, records_per_segment: 364 };
        assert_eq!((geometry.header_slot(), geometry.payload_slot()), (256, 737_280));
        assert_eq!(Geometry { page_size: 1, ..geometry }.header_slot(), 256);
        assert_eq!(Geometry { page_size: 32, ..geometry }.header_slot(), 512);
        assert_eq!(Geometry { page_size: 128, ..geometry }.header_slot(), 1024);
    }

    #[test]
    fn caps_decide_the_number_of_segments() {
        let segments = |cap: u64| {
            Geometry::choose(16, 737_280, cap).map(|geometry| geometry.segments_within(cap)).unwrap()
        };
        assert_eq!(segments(4 << 20), 5);
        assert!((8..12).contains(&segments(200 << 20)));
        assert!((38..45).contains(&segments(10 << 30)));
        assert!((120..130).contains(&segments(1 << 40)));
        assert!(Geometry::choose(16, 737_280, 700_000).is_none());
        let least = Geometry::least_cap(16, 737_280);
        assert!(Geometry::choose(16, 737_280, least).is_some());
        assert!(Geometry::choose(16, 737_280, least - 1).is_none());
    }

    proptest! {
        #[test]
        fn areas_never_overlap_and_stay_under_the_cap(
            page_size in 1u32..300, page_bytes in 1u32..2_000_000, cap in 0u64..1 << 33,
        ) {
            let Some(geometry) = Geometry::choose(page_size, page_bytes, cap) else {
                prop_assert!(cap < Geometry::least_cap(page_size, page_bytes));
                return Ok(());
            };
            let last = geometry.records_per_segment - 1;
            prop_assert!(geometry.header_offset(last) + geometry.header_slot() <= geometry.header_bytes());
            prop_assert!(geometry.payload_offset(last) % BLOCK == 0);
            let segments = geometry.segments_within(cap);
            prop_assert!(segments * geometry.segment_cost() <= cap);
            let page = geometry.page(segments as usize - 1, last);
            prop_assert_eq!(geometry.locate(page), (segments as usize - 1, last));
        }
    }
}
