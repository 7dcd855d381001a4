"""What the launcher sends to AWS and reads of its answers, as types: boto3 has none of its own.

Names are those of AWS's API references. Answers have more fields than those here, which are read.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, NotRequired, Protocol, TypedDict, Unpack, overload


class MetricDefinition(TypedDict):
    """A metric, and the regular expression that finds it in the log."""

    Name: str
    Regex: str


class ImageConfig(TypedDict):
    """How SageMaker reaches the image's registry."""

    TrainingRepositoryAccessMode: str


class AlgorithmSpecification(TypedDict):
    """What runs."""

    TrainingImage: str
    TrainingInputMode: str
    MetricDefinitions: list[MetricDefinition]
    TrainingImageConfig: NotRequired[ImageConfig]


class InstanceGroup(TypedDict):
    """Some instances of one type."""

    InstanceGroupName: str
    InstanceType: str
    InstanceCount: int


class InstancePreference(TypedDict):
    """A type of instance that a job may get."""

    InstanceType: str
    InstanceCount: NotRequired[int]
    TrainingPlanArns: NotRequired[list[str]]


class ResourceConfig(TypedDict, total=False):
    """The instances and their volumes. Answers alone have the two that begin with Selected."""

    VolumeSizeInGB: int
    VolumeKmsKeyId: str
    TrainingPlanArn: str
    InstanceGroups: list[InstanceGroup]
    InstancePreferences: list[InstancePreference]
    InstanceType: str
    InstanceCount: int
    KeepAlivePeriodInSeconds: int
    SelectedInstanceType: str
    SelectedInstanceCount: int


class S3DataSource(TypedDict):
    """Data on S3."""

    S3DataType: str
    S3Uri: str
    S3DataDistributionType: str
    InstanceGroupNames: NotRequired[list[str]]


class FileSystemDataSource(TypedDict):
    """A folder of a file system."""

    FileSystemId: str
    FileSystemAccessMode: str
    FileSystemType: str
    DirectoryPath: str


class DataSource(TypedDict, total=False):
    """Where a channel's data are: in one of these."""

    S3DataSource: S3DataSource
    FileSystemDataSource: FileSystemDataSource


class Channel(TypedDict):
    """Input data."""

    ChannelName: str
    InputMode: str
    DataSource: DataSource


class OutputDataConfig(TypedDict):
    """Where the model goes."""

    S3OutputPath: str
    KmsKeyId: NotRequired[str]


class CheckpointConfig(TypedDict):
    """Where the checkpoints go, and come from."""

    S3Uri: str


class StoppingCondition(TypedDict):
    """How long a job may run, and how long a spot job may wait and run."""

    MaxRuntimeInSeconds: int
    MaxWaitTimeInSeconds: NotRequired[int]


class Tag(TypedDict):
    """A tag of a job."""

    Key: str
    Value: str


class VpcConfig(TypedDict):
    """The job's network."""

    Subnets: list[str]
    SecurityGroupIds: list[str]


class RetryStrategy(TypedDict):
    """How often a job starts again after an internal error."""

    MaximumRetryAttempts: int


class Request(TypedDict):
    """The request of CreateTrainingJob."""

    TrainingJobName: str
    AlgorithmSpecification: AlgorithmSpecification
    RoleArn: str
    OutputDataConfig: OutputDataConfig
    ResourceConfig: ResourceConfig
    StoppingCondition: StoppingCondition
    InputDataConfig: NotRequired[list[Channel]]
    HyperParameters: NotRequired[dict[str, str]]
    Environment: NotRequired[dict[str, str]]
    Tags: NotRequired[list[Tag]]
    VpcConfig: NotRequired[VpcConfig]
    EnableNetworkIsolation: NotRequired[bool]
    EnableManagedSpotTraining: NotRequired[bool]
    CheckpointConfig: NotRequired[CheckpointConfig]
    RetryStrategy: NotRequired[RetryStrategy]


class StatusChange(TypedDict):
    """A status of a job, and from when to when; the present one has no end."""

    Status: str
    StartTime: datetime
    EndTime: NotRequired[datetime]
    StatusMessage: NotRequired[str]


class Metric(TypedDict):
    """The last value of a metric."""

    MetricName: str
    Value: float


class ModelArtifacts(TypedDict):
    """Where the model is."""

    S3ModelArtifacts: str


class Job(TypedDict):
    """The answer of DescribeTrainingJob."""

    TrainingJobName: str
    TrainingJobArn: str
    TrainingJobStatus: str
    SecondaryStatus: NotRequired[str]
    FailureReason: NotRequired[str]
    SecondaryStatusTransitions: NotRequired[list[StatusChange]]
    FinalMetricDataList: NotRequired[list[Metric]]
    ModelArtifacts: NotRequired[ModelArtifacts]
    TrainingTimeInSeconds: NotRequired[int]
    BillableTimeInSeconds: NotRequired[int]
    ResourceConfig: NotRequired[ResourceConfig]
    CheckpointConfig: NotRequired[CheckpointConfig]
    EnableManagedSpotTraining: NotRequired[bool]


class JobSummary(TypedDict):
    """An entry of ListTrainingJobs."""

    TrainingJobName: str
    TrainingJobStatus: str
    CreationTime: datetime


class JobsPage(TypedDict):
    """An answer of ListTrainingJobs."""

    TrainingJobSummaries: list[JobSummary]


class TagsPage(TypedDict):
    """An answer of ListTags."""

    Tags: NotRequired[list[Tag]]


class LogStream(TypedDict):
    """The log of one instance."""

    logStreamName: str


class StreamsPage(TypedDict):
    """An answer of DescribeLogStreams."""

    logStreams: list[LogStream]


class LogEvent(TypedDict):
    """A line of a log."""

    message: str


class LogPage(TypedDict):
    """An answer of GetLogEvents."""

    events: list[LogEvent]
    nextForwardToken: str


class JobsPaginator(Protocol):
    """Asks for one page of jobs after the other."""

    def paginate(
        self, *, SortBy: str, SortOrder: str, PaginationConfig: dict[str, int]
    ) -> Iterable[JobsPage]:
        """Yield the pages."""


class TagsPaginator(Protocol):
    """Asks for one page of tags after the other."""

    def paginate(self, *, ResourceArn: str) -> Iterable[TagsPage]:
        """Yield the pages."""


class StreamsPaginator(Protocol):
    """Asks for one page of log streams after the other."""

    def paginate(self, *, logGroupName: str, logStreamNamePrefix: str) -> Iterable[StreamsPage]:
        """Yield the pages."""


class SageMaker(Protocol):
    """The client of SageMaker."""

    def create_training_job(self, **request: Unpack[Request]) -> object:
        """Start a job."""

    def describe_training_job(self, *, TrainingJobName: str) -> Job:
        """Return what is known of a job."""

    def stop_training_job(self, *, TrainingJobName: str) -> object:
        """Stop a job."""

    @overload
    def get_paginator(self, operation_name: Literal["list_training_jobs"]) -> JobsPaginator: ...
    @overload
    def get_paginator(self, operation_name: Literal["list_tags"]) -> TagsPaginator: ...


class LogExceptions(Protocol):
    """The errors of CloudWatch Logs."""

    ResourceNotFoundException: type[Exception]


class Logs(Protocol):
    """The client of CloudWatch Logs."""

    exceptions: LogExceptions

    def get_paginator(self, operation_name: Literal["describe_log_streams"]) -> StreamsPaginator:
        """Return what asks for the streams."""

    def get_log_events(
        self, *, logGroupName: str, logStreamName: str, startFromHead: bool, nextToken: str = ...
    ) -> LogPage:
        """Return the next lines of a stream."""


class ClientMeta(Protocol):
    """What a client knows of itself."""

    region_name: str


class S3(Protocol):
    """The client of S3."""

    meta: ClientMeta

    def head_bucket(self, *, Bucket: str) -> dict[str, Any]:
        """Return the bucket's region, as BucketRegion, or raise."""

    def list_objects_v2(self, *, Bucket: str, Prefix: str, MaxKeys: int) -> dict[str, Any]:
        """Return how many objects there are, as KeyCount."""


class Registry(Protocol):
    """The client of Amazon ECR."""

    def describe_images(
        self, *, registryId: str, repositoryName: str, imageIds: list[dict[str, str]]
    ) -> object:
        """Raise unless the images exist."""
