"""Packaging of accelopt-ray: top-level packages, so that ``ray job submit --working-dir .`` needs no install step."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# Ranges are wide because a Ray cluster shares one Python minor version with its Neuron nodes, which bring 3.10 or 3.12;
# constraints.txt pins the versions that the tests run with.
REQUIREMENTS = [
    "ray[default]>=2.40,<3",
    "openai>=1.60",
    "httpx>=0.27",
    "tenacity>=8.2",
    "jinja2>=3.1",
    "numpy>=2.2,<3",
    "ml_dtypes>=0.5",
    "threadpoolctl>=3.5",
    "pandas>=2.3",
    "pyarrow>=18",
    "pydantic>=2.8,<3",
    "pyyaml>=6",
    "typer>=0.15",
    "rich>=13",
    "starlette>=0.40",
    "uvicorn>=0.30",
    "platformdirs>=4",
    "psutil>=5.9",
    "jsonschema>=4.20",
]

EXTRAS = {
    # Ray pins the vLLM it works with; a vLLM of one's own choosing would fight that pin.
    "gpu": ["ray[llm]>=2.40,<3"],
    # From AWS's package index (--extra-index-url https://pip.repos.neuron.amazonaws.com): the general index carries
    # empty placeholders below version 2, which the lower bounds keep out.
    "neuron": ["neuronx-cc>=2", "torch-neuronx>=2"],
    "analysis": ["matplotlib>=3.10"],
    "dev": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "duckdb>=1.1",
        "ruff>=0.8",
        "mypy>=1.13",
        # A local S3 server for the tests; moto's own extra for it brings thirty packages more.
        "moto[s3]>=5",
        "flask>=3",
        "flask-cors>=5",
        "pandas-stubs>=2.2",
        "types-PyYAML>=6.0",
    ],
}

setup(
    name="accelopt-ray",
    version="0.1.0",
    description="Ray-based parallel search that makes accelerator kernels faster, AWS Trainium NKI kernels first",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["accelopt_ray*", "actors*", "nkibench*"]),
    package_data={
        "accelopt_ray": ["py.typed", "**/*.j2", "**/*.md", "**/*.yaml", "**/*.csv", "**/*.json"],
        "actors": ["py.typed"],
        "nkibench": ["py.typed", "**/*.yaml", "**/*.csv", "**/*.json", "**/reference.py", "**/baseline.py"],
    },
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["accelopt-ray = accelopt_ray.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering",
    ],
)
