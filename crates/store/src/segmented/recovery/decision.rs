//! What opening a store does about what it finds: one pure function, drawn as a table in
//! `docs/formats/segment.md`.

/// What was found in the folder. "Newest" is the segment with the highest start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Case {
    /// The newest segment ends with its last block.
    NewestWhole,
    /// The newest segment ends in zeros that were reserved ahead.
    NewestReserved,
    /// The newest segment was begun in an older one's file, and behind its last block stands what
    /// that one left.
    NewestOld,
    /// Bytes behind the last valid block of the newest segment that no fsync is known to have
    /// covered.
    NewestTorn,
    /// A bad block in the newest segment, and behind it a valid one that was written when an fsync
    /// had already covered the bad one.
    NewestDamaged,
    /// The newest segment file has no bytes.
    NewestEmpty,
    /// The newest segment's header is torn and no block stands in the file.
    NewestHeaderTorn,
    /// The newest segment's header cannot be read, but blocks stand in the file.
    NewestHeaderDamaged,
    /// An older segment whose blocks reach exactly to the next one's start.
    OlderWhole,
    /// An older segment with a bad block, or one that ends before the next one starts.
    OlderDamaged,
    /// An older segment file has no bytes.
    OlderEmpty,
    /// An older segment's header cannot be read.
    OlderHeaderDamaged,
    /// A segment's header and its file name disagree.
    HeaderNameMismatch,
    /// A segment or the cursors belong to another store.
    OtherStore,
    /// Two neighbouring segments leave a gap between them.
    SegmentMissing,
    /// Two neighbouring segments hold the same positions.
    SegmentsOverlap,
    /// A format version newer than this build's.
    NewerVersion,
    /// An index that fits its segment.
    IndexFits,
    /// No index beside an older segment.
    IndexAbsent,
    /// An index that is short or garbage.
    IndexGarbage,
    /// An index that is well-formed but does not fit its segment.
    IndexWrong,
    /// An index without a segment.
    IndexWithoutSegment,
    /// A spill that an entry names, with its footer.
    SpillWhole,
    /// A spill that no entry names.
    SpillUnreferenced,
    /// An entry names a spill that is not there.
    SpillMissing,
    /// A spill that an entry names has no valid header and footer.
    SpillDamaged,
    /// The cursor file's checksum does not match.
    CursorsDamaged,
    /// The notes file's checksum does not match.
    NotesDamaged,
    /// A cursor needs log from before the oldest segment.
    CursorBeforeLog,
    /// The log ends before a position that is recorded as durable.
    LogShorterThanRecorded,
    /// The file of a dropped segment, kept for one to come.
    OldFile,
    /// A half-written replacement of a small file.
    LeftoverFile,
    /// A file that is not ours.
    ForeignFile,
}

/// What is done about a [`Case`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Used as it is.
    Keep,
    /// The file is cut after its last valid block; a log line says how many bytes were dropped.
    Truncate,
    /// The file is removed.
    Remove,
    /// The file is written anew from its segment.
    Rebuild,
    /// Left alone with a warning.
    Ignore,
    /// Opening fails with [`crate::StoreError::Damaged`]; nothing is changed.
    RefuseDamaged,
    /// Opening fails with [`crate::StoreError::Newer`]; nothing is changed.
    RefuseNewer,
}

/// The table.
pub fn decide(case: Case) -> Action {
    match case {
        Case::NewestWhole | Case::OlderWhole | Case::IndexFits | Case::SpillWhole => Action::Keep,
        Case::NewestReserved | Case::NewestOld | Case::NewestTorn => Action::Truncate,
        Case::NewestEmpty
        | Case::NewestHeaderTorn
        | Case::IndexWithoutSegment
        | Case::SpillUnreferenced
        | Case::OldFile
        | Case::LeftoverFile => Action::Remove,
        Case::IndexAbsent | Case::IndexGarbage | Case::IndexWrong => Action::Rebuild,
        Case::ForeignFile => Action::Ignore,
        Case::NewerVersion => Action::RefuseNewer,
        Case::NewestDamaged
        | Case::NewestHeaderDamaged
        | Case::OlderDamaged
        | Case::OlderEmpty
        | Case::OlderHeaderDamaged
        | Case::HeaderNameMismatch
        | Case::OtherStore
        | Case::SegmentMissing
        | Case::SegmentsOverlap
        | Case::SpillMissing
        | Case::SpillDamaged
        | Case::CursorsDamaged
        | Case::NotesDamaged
        | Case::CursorBeforeLog
        | Case::LogShorterThanRecorded => Action::RefuseDamaged,
    }
}

/// What the operator can do about a case that is refused as damaged.
pub(crate) fn remedy(case: Case) -> &'static str {
    match case {
        Case::CursorsDamaged => {
            "Nothing was changed. Restore the file from a copy, or remove it: subscriptions then \
             register anew, and one that has not applied all of this log may have to be copied anew \
             (farshore resync), since nobody claims the log until it does"
        }
        Case::NotesDamaged => {
            "Nothing was changed. Restore the file from a copy. Without it this log cannot be \
             continued: everything has to be copied anew into an empty data_dir"
        }
        Case::OtherStore => {
            "Nothing was changed. Move the file back to the store it came from, or give this site \
             its own data_dir"
        }
        _ => super::super::REMEDY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! rows {
        ($($name:ident: $case:ident => $action:ident;)*) => {
            $(#[test]
            fn $name() {
                assert_eq!(decide(Case::$case), Action::$action);
            })*
        };
    }

    rows! {
        newest_whole: NewestWhole => Keep;
        newest_reserved: NewestReserved => Truncate;
        newest_old: NewestOld => Truncate;
        newest_torn: NewestTorn => Truncate;
        newest_damaged: NewestDamaged => RefuseDamaged;
        newest_empty: NewestEmpty => Remove;
        newest_header_torn: NewestHeaderTorn => Remove;
        newest_header_damaged: NewestHeaderDamaged => RefuseDamaged;
        older_whole: OlderWhole => Keep;
        older_damaged: OlderDamaged => RefuseDamaged;
        older_empty: OlderEmpty => RefuseDamaged;
        older_header_damaged: OlderHeaderDamaged => RefuseDamaged;
        header_name_mismatch: HeaderNameMismatch => RefuseDamaged;
        other_store: OtherStore => RefuseDamaged;
        segment_missing: SegmentMissing => RefuseDamaged;
        segments_overlap: SegmentsOverlap => RefuseDamaged;
        newer_version: NewerVersion => RefuseNewer;
        index_fits: IndexFits => Keep;
        index_absent: IndexAbsent => Rebuild;
        index_garbage: IndexGarbage => Rebuild;
        index_wrong: IndexWrong => Rebuild;
        index_without_segment: IndexWithoutSegment => Remove;
        spill_whole: SpillWhole => Keep;
        spill_unreferenced: SpillUnreferenced => Remove;
        spill_missing: SpillMissing => RefuseDamaged;
        spill_damaged: SpillDamaged => RefuseDamaged;
        cursors_damaged: CursorsDamaged => RefuseDamaged;
        notes_damaged: NotesDamaged => RefuseDamaged;
        cursor_before_log: CursorBeforeLog => RefuseDamaged;
        log_shorter_than_recorded: LogShorterThanRecorded => RefuseDamaged;
        old_file: OldFile => Remove;
        leftover_file: LeftoverFile => Remove;
        foreign_file: ForeignFile => Ignore;
    }
}
