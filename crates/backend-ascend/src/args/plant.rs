//! Faults that are planted in the kernels.

use ep_core::c_enum;

c_enum! {
    /// A fault, made on purpose in kernels that are built for tests: EpLaunch.plant; 0 for none.
    pub enum Plant = "EP_PLANT" {
        /// A word is copied before the scalar unit has written it.
        WordFlag = 1,
        /// A word is overwritten before its copy has ended.
        WordReused = 2,
        /// A cell is read from the cache, without a clean.
        StaleCell = 3,
        /// A tail is published before its rows have landed.
        TailBeforeRows = 4,
        /// Credit is returned before the row has been read.
        CreditEarly = 5,
        /// A buffer is filled before the copies out of it have ended.
        BufferReused = 6,
        /// A payload is stored before it was loaded.
        FilledFlag = 7,
        /// The scalar unit reads a header before it was loaded, or credit is returned before the slot was read.
        ReadFlag = 8,
        /// A header is stored before the scalar unit has written it.
        HeaderFlag = 9,
        /// An addend is used before it was loaded.
        LoadedFlag = 10,
        /// A vector instruction uses what the one before has not yet written.
        VectorBarrier = 11,
        /// A rounded sum is overwritten before it was stored.
        OutReused = 12,
        /// A rounded sum is stored before it was written.
        SummedFlag = 13,
        /// Rows are put one slot further than they belong.
        WrongSlot = 14,
        /// Rows name a position that is one too high.
        PositionOffByOne = 15,
        /// Slots are filled without credit.
        NoCredit = 16,
        /// Ends of rings wait without publishing what is pending.
        Impolite = 17,
        /// Tails behind the second row are never published.
        TailLost = 18,
        /// No verdict is found when time is up.
        NoDeadline = 19,
        /// No wait is told to the other ranks.
        Silent = 20,
        /// A core's line is copied before the scalar unit has written it.
        LineFlag = 21,
        /// A count is kept by a scalar store that nothing cleans.
        ScalarStore = 22,
        /// A count is kept by a scalar store, in a line that other cores store to.
        SharedLine = 23,
        /// Rows are stored in whole blocks of 32 bytes.
        WholeBlocks = 24,
        /// Rows are put one slot further, also beyond the ring.
        BeyondTheRing = 25,
        /// Received rows are stored one row further.
        BeyondTheRows = 26,
        /// Rows are put to memory that is no window.
        NoWindow = 27,
        /// A flag is set twice.
        FlagTwice = 28,
        /// A flag is left set.
        FlagLeft = 29,
        /// A flag is waited for and not set.
        FlagMissing = 30,
        /// A flag has an id of the framework's.
        FlagId = 31,
        /// A role asks for all of the UB, beside what every core has.
        UbFull = 32,
        /// A buffer of the UB is not aligned.
        UbAlignment = 33,
        /// Sums are rounded after each row.
        RoundedTooEarly = 34,
        /// A sum is rounded by a mode that its type does not have.
        Rounding = 35,
        /// A sum begins with what the buffer holds.
        SumNotCleared = 36,
        /// An addend is loaded before the one before it in the buffer was used.
        InputReused = 37,
        /// Weights of other ranks are not summed.
        WeightsLost = 38,
        /// Choices of later ranks' experts stay in a row.
        ExpertsOfOthers = 39,
        /// The header of a ring is not compared.
        HeaderUnchecked = 40,
        /// Nobody looks at what kind of operation others have begun.
        KindUnheard = 41,
        /// Nobody looks at who is gone.
        GoneUnheard = 42,
        /// Verdicts of other ranks are not heard.
        VerdictUnheard = 43,
        /// Cells are published without the generation.
        NoGeneration = 44,
        /// Cells are published in the place of another writer.
        WrongCell = 45,
        /// Ticks of the system counter are taken for nanoseconds.
        Ticks = 46,
        /// Credit is returned for rows that were never sent.
        HeadBeyond = 47,
        /// A tail claims more rows than the ring holds.
        TailBeyond = 48,
        /// Only the first piece of a long row is received.
        LaterPieces = 49,
        /// A ring's opening names a first position that is one too high.
        WrongShare = 50,
        /// A ring's opening says one row more.
        RowsTooMany = 51,
        /// A ring is filled before the rings of the operation before are empty.
        NotClear = 52,
        /// A peer that is known to be gone is given up without another look.
        GoneAtOnce = 53,
        /// Both launches of an operation have the same mark.
        OneMark = 54,
        /// Counts are announced before they have landed.
        CountsEarly = 55,
        /// Counts are put to the bank of the next operation.
        WrongBank = 56,
        /// The header of a counts message is not compared.
        CountsUnchecked = 57,
        /// Choices are counted of the experts that the next rank has.
        CountsOfOthers = 58,
        /// More rows than there is room for are not refused.
        BoundUnheeded = 59,
        /// Counts of masked ranks are not zero.
        MaskedCounted = 60,
        /// A matrix of counts is stored before it was loaded.
        CountsFlag = 61,
        /// Choices are read before they were loaded.
        ChoicesFlag = 62,
        /// A token may name an expert twice, whatever was said.
        RepeatsTaken = 63,
        /// Choices of masked ranks' experts count.
        MaskedChosen = 64,
        /// Choices of no expert are not told.
        BadTaken = 65,
        /// A core tells what it has counted before that has landed.
        ToldEarly = 66,
        /// A core does not wait for the cores before it.
        ShareUnawaited = 67,
        /// Positions are overwritten before they were stored.
        PositionsReused = 68,
        /// A core says that it has ended a launch of which it did nothing.
        EndedUnbegun = 69,
        /// A piece of a row that becomes INT8 is used before it was loaded.
        PieceFlag = 70,
        /// The next piece is loaded before the vector unit has read the one before.
        PieceReused = 71,
        /// Magnitudes are compared by the scalar unit before the vector unit has written them.
        LargestFlag = 72,
        /// What lies behind a piece is compared, too.
        RestLeft = 73,
        /// Negative elements have no magnitude.
        SignsKept = 74,
        /// Only a row's first piece decides about its scale.
        FirstPiece = 75,
        /// Codes are rounded towards zero.
        TowardsZero = 76,
        /// Codes are stored before they were written.
        CodesFlag = 77,
        /// Codes are overwritten before they were stored.
        CodesReused = 78,
        /// Rows with an infinity or a NaN are coded as others.
        NoNumbers = 79,
        /// Rows of zeros are divided by zero.
        NoLeast = 80,
        /// The owner bit turns with the laps of a queue of twice the depth.
        OtherDepth = 81,
        /// The owner bit never turns.
        OwnerStays = 82,
        /// An element names the key of its source as that of its target.
        KeysSwapped = 83,
        /// An element is stored before the scalar unit has written it.
        ElementFlag = 84,
        /// The doorbell is rung before the element has landed.
        BellEarly = 85,
        /// The doorbell has all bits of the count.
        BellWide = 86,
        /// Values that are published to another server have one word as their source.
        OneWord = 87,
        /// Elements are posted without room.
        QueueFull = 88,
        /// Places of completions are not given back.
        CompletionsKept = 89,
        /// A tail goes to another server before its rows.
        TailFirst = 90,
        /// Staging memory is given back before the card has read it.
        StagingEarly = 91,
        /// Rows are sent to another server of which one core has filled its slots, and another has not.
        GapsSent = 92,
        /// Credit is not returned to another server.
        FarCreditLost = 93,
        /// Slots of a ring to another server are filled without credit.
        FarUnasked = 94,
        /// Staging memory is filled that was not given back.
        StagingUnasked = 95,
        /// A server is told of one row more for each of its ranks.
        ShareTooLong = 96,
        /// A row's mask names all ranks of a server.
        MaskOfAll = 97,
        /// Choices of a row that is passed on are counted over all experts.
        NotLocalized = 98,
        /// A server's own sum is not rounded before it is added.
        PartUnrounded = 99,
        /// A coordinator ends though its queue was too full for all that was staged.
        LeftUnsent = 100,
        /// A rank does not say what its wait comes from, but whom it waits for.
        NotRelayed = 101,
        /// Waits for ranks that wait themselves count like others.
        ExplainedFirst = 102,
        /// A rank that has failed ends before the card has sent its verdict.
        VerdictUnposted = 103,
        /// Rows of low latency are put to banks that are still read.
        LowBankUnasked = 104,
        /// A rank says that it has received before it has read.
        LowReceivedEarly = 105,
        /// Rows are put to the bank of the other parity.
        LowWrongBank = 106,
        /// An arrival is published before its rows are put.
        LowToldEarly = 107,
        /// An arrival is published before the cores have landed that share its rows.
        LowHelpersUnawaited = 108,
        /// A word of another core is read from the cache, without a clean.
        LowStaleWord = 109,
        /// A core tells what it has counted of received rows before that has landed.
        LowCountsEarly = 110,
        /// A core places received rows without those of the shares before.
        LowSharesUnawaited = 111,
        /// Headers bear no generation.
        LowNoGeneration = 112,
        /// A source that has not come is taken for one that sends nothing.
        LowArrivalUnawaited = 113,
        /// An arrival says one row more.
        LowOneMore = 114,
        /// What an arrival brings is not compared.
        LowKindUnchecked = 115,
        /// A rank does not hear that it was masked.
        LowMaskUnheard = 116,
        /// Verdicts of throughput mode are not heard in low latency.
        LowVerdictUnheard = 117,
        /// A rank does not say for whom it waits in low latency.
        LowSilent = 118,
        /// No wait of low latency ends when time is up.
        LowNoDeadline = 119,
        /// Rows of low latency are stored in whole blocks of 32 bytes.
        LowWholeBlocks = 120,
        /// Only the first piece of a long row is sent.
        LowFirstPiece = 121,
        /// What lies between codes and scale is sent as it is.
        LowPadLeft = 122,
        /// The header of a result is stored before the scalar unit has written it.
        LowResultHeaderFlag = 123,
        /// All results of a rank for a token go to one slot.
        LowOneColumn = 124,
        /// A rank sums its experts' results without weights.
        LowWeightsLost = 125,
        /// A weighted addend is loaded before the one before it in the buffer was used.
        LowAddendReused = 126,
        /// A weighted addend is used before it was loaded.
        LowAddendFlag = 127,
        /// A weighted sum uses what the instruction before has not yet written.
        LowStepBarrier = 128,
        /// A weighted sum is stored before it was rounded.
        LowSumFlag = 129,
        /// A step of a weighted sum is rounded twice.
        LowRoundedTwice = 130,
        /// An infinity in a weighted sum becomes no number.
        LowInfinitiesLost = 131,
        /// What a step of a weighted sum lacks is rounded to nearest, and then once more.
        LowNotOdd = 132,
        /// Staging memory of low latency is filled anew before the card has acknowledged what was posted out of it.
        LowFarStagingEarly = 133,
        /// A core tells of one row more than it has staged.
        LowFarOneMore = 134,
        /// An arrival goes to another server before its rows.
        LowFarArrivalFirst = 135,
        /// An arrival goes to another server when the first of its rows' cores has staged its own.
        LowFarHelpersUnawaited = 136,
        /// A message to another server carries a row's header without its payload.
        LowFarCut = 137,
        /// For whom this rank waits is not told to other servers.
        LowFarSilent = 138,
        /// What this rank has received is not told to other servers.
        LowFarUnreceived = 139,
        /// A rank of another server is not told that it is masked.
        LowFarMaskUntold = 140,
        /// Who has waited for less than half of its time does not say for whom, though it is waited for.
        LowAskedTooEarly = 141,
        /// A script of verbs publishes before what it has put has landed.
        ProbePublishedEarly = 142,
        /// A script does not wait for what it flushes.
        ProbeFlushedEarly = 143,
        /// A script puts to places outside of the window.
        ProbeUnchecked = 144,
        /// A script puts a byte less than it says.
        ProbePutShort = 157,
        /// A script that waits does not hear that its peer is gone.
        ProbeGoneUnheard = 145,
        /// A rank leaves behind a sending half before its queues have done what it has posted.
        LowFarUndrained = 146,
        /// Waits of low latency for ranks that wait themselves count like others.
        LowExplainedFirst = 147,
        /// A core that comes when its rank has failed does not say that it has ended.
        LateUntold = 148,
        /// A half whose rows for another server find no room does not say that it waits.
        LowFarUnsaid = 149,
        /// A core tells its choices of each expert before they have landed.
        SpreadToldEarly = 150,
        /// What stands between the rows of two experts is left as it was.
        PaddingLeft = 151,
        /// Zeros are stored before they were written.
        ZerosFlag = 152,
        /// A core's choices begin where their experts do, whatever the shares before have.
        SpreadUnshared = 153,
        /// The first slots of a source are changed before they were stored.
        OffsetsReused = 154,
        /// The results of a row's choices are added from the last to the first.
        FoldDescending = 155,
        /// Slots are not awaited before others are stored.
        SlotsReused = 156,
    }
}
